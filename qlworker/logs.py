"""Events on standard error: one line each, under 900 bytes, never a secret, and never in the worker's way.

procd and musl's syslog cut longer lines. A log that cannot be written (a full pipe, a reader that went, a full disk) is not a
reason to stop or to wait: the line is dropped and counted, and the count is told when writing works again.
"""

import logging
import os
import re
import select
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, Literal, cast

import msgspec
import structlog

from .ports import Log

LINE_BYTES: Final = 900
"""A line with its newline is shorter than this."""

_FIELD_CHARACTERS: Final = 240
_REDACTED: Final = "[redacted]"
_SECRET_KEY: Final = re.compile(r"token|secret|authorization|password|key|environment|command|argv", re.IGNORECASE)
_SECRET_VALUE: Final = re.compile(r"ql3w_\S+|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*")
_FRAME: Final = ("time", "level", "event")

_Event = MutableMapping[str, Any]


def configure(level: Literal["debug", "info", "warning", "error"], format: str = "auto", *, fd: int = 2) -> Log:
    """The program's log. `format` is "json", "human", or "auto": human when `fd` is a terminal.

    Nothing global is configured. A closed `fd` becomes /dev/null: the next file opened would get its number, and the lines.
    """
    try:
        os.fstat(fd)
    except OSError:
        _open_null_as(fd)
    is_human = format == "human" or (format == "auto" and os.isatty(fd))
    render = render_human if is_human else render_json
    lines = LineWriter(fd, lambda count: render(_stamped({"event": "log_lines_dropped", "level": "warning", "count": count})))
    wrapper = structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
    log = structlog.wrap_logger(
        lines,
        wrapper_class=wrapper,
        context_class=dict,
        cache_logger_on_first_use=True,
        processors=[
            structlog.processors.add_log_level,
            lambda _logger, _method, event: render(redact(_explained(_stamped(event)))),
        ],
    )
    return cast("Log", log)


def forward_library_logs(log: Log) -> None:
    """Sends warnings of libraries that use the standard logging to `log`. Called once, by the composition root: otherwise
    they would be written to standard error in another form, and with a write that may block."""
    root = logging.getLogger()
    root.addHandler(_LibraryHandler(log))


class LineWriter:
    """Writes lines to a descriptor that may be shared, so it is never made non-blocking: it is asked first whether it takes
    a line. A pipe that says so has room for 4 KiB (PIPE_BUF), a socket for a quarter of its buffer."""

    def __init__(self, fd: int, notice: Callable[[int], str]) -> None:
        self._fd = fd
        self._notice = notice
        self._dropped = 0
        self._is_torn = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, line: str) -> None:
        """Writes `line`, or drops it. Never raises and never waits."""
        if self._dropped and self._put(self._notice(self._dropped)):
            self._dropped = 0
        if self._dropped or not self._put(line):
            self._dropped += 1

    debug = info = warning = error = critical = write

    def _put(self, line: str) -> bool:
        # a line that was cut off must not swallow the next one
        data = b"\n" * self._is_torn + line.encode() + b"\n"
        done = 0
        try:
            while done < len(data) and self._takes_more():
                done += os.write(self._fd, data[done:])
        except OSError:
            pass  # EPIPE, ENOSPC, EIO of a lost terminal: counted by the caller
        if 0 < done < len(data):
            self._is_torn = True
        elif done:
            self._is_torn = False
        return done == len(data)

    def _takes_more(self) -> bool:
        return any(events & select.POLLOUT for _, events in self._poll.poll(0))


class _LibraryHandler(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        report = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        try:
            message = record.getMessage()
        except Exception:  # a wrong format string in a library
            message = "(a message that cannot be formatted)"
        report("library_message", library=record.name, message=message)


def redact(event: Mapping[str, Any]) -> dict[str, Any]:
    """The last net, not the first: whoever logs passes no secrets. Fields that are named like one lose their value, texts
    lose what looks like one, and everything becomes a number, a text, a list or a table of such."""
    return {name: _clean(value) if name in _FRAME else _clean_field(name, value) for name, value in event.items()}


def _clean_field(name: str, value: Any) -> Any:
    return _REDACTED if _SECRET_KEY.search(name) else _clean(value)


def _clean(value: Any, depth: int = 3) -> Any:
    if value is None or isinstance(value, bool | float) or (type(value) is int and -(2**63) <= value < 2**64):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value)} bytes)"
    if isinstance(value, Mapping | list | tuple | set | frozenset) and not depth:
        return "(nested too deep)"
    if isinstance(value, Mapping):
        return {
            str(name): _REDACTED if _SECRET_KEY.search(str(name)) else _clean(each, depth - 1) for name, each in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(each, depth - 1) for each in value]
    try:
        text = str(value)
    except Exception:  # an event is told even when a field cannot be
        text = f"({type(value).__name__} without a text)"
    # a file name may hold bytes that are no UTF-8, and a redaction must not be cut in two by the shortening
    return _SECRET_VALUE.sub(_REDACTED, text).encode("utf-8", "backslashreplace").decode()


def render_json(event: Mapping[str, Any]) -> str:
    """One JSON object of less than 900 bytes."""
    return _fitted(event, lambda fields: msgspec.json.encode(fields).decode())


def render_human(event: Mapping[str, Any]) -> str:
    """Time, level, event and `name=value` pairs in less than 900 bytes. What a terminal would act on is escaped."""

    def render(fields: Mapping[str, Any]) -> str:
        pairs = "".join(f" {name}={_plain(value)}" for name, value in fields.items() if name not in _FRAME)
        return f"{str(fields['time'])[:19]}Z {fields['level']:<7} {_plain(fields['event'])}{pairs}"

    return _fitted(event, render)


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if text and text.isprintable() and " " not in text and '"' not in text:
        return text
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return '"' + escaped.replace('"', '\\"') + '"'


def _fitted(event: Mapping[str, Any], render: Callable[[Mapping[str, Any]], str]) -> str:
    """`event` rendered, its longest texts shortened and if need be its last fields left out until the line is short enough."""
    fields = {name: _shortened(value, _FIELD_CHARACTERS) for name, value in event.items()}
    line = render(fields)
    while len(line.encode()) + 1 >= LINE_BYTES:
        free = [name for name in fields if name not in _FRAME]
        longest = max(free, key=lambda name: len(_plain(fields[name])), default=None)
        if longest is None:
            fields = {**fields, "event": _shortened(str(fields["event"]), 60)}
        elif (length := len(_plain(fields[longest]))) > 24:
            fields[longest] = _shortened(_plain(fields[longest]), length // 2)
        else:
            del fields[free[-1]]
        line = render(fields)
    return line


def _shortened(value: Any, characters: int) -> Any:
    if isinstance(value, str) and len(value) > characters:
        return value[: characters - 1] + "…"
    return value


def _stamped(event: Mapping[str, Any]) -> dict[str, Any]:
    """Time, level and name first, and the rest in the order given."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03}Z"
    return {"time": stamp, "level": event["level"], "event": event["event"], **_without_frame(event)}


def _without_frame(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in _FRAME}


def _explained(event: dict[str, Any]) -> dict[str, Any]:
    """`exc_info` as the error's type and text and the place it came from: a traceback does not fit into a line."""
    info = event.pop("exc_info", None)
    error = info if isinstance(info, BaseException) else None
    if info and error is None:
        import sys

        error = info[1] if isinstance(info, tuple) else sys.exc_info()[1]
    if error is None:
        return event
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = None
    if frame is not None:
        code = frame.tb_frame.f_code
        where = f"{code.co_filename.rpartition('/')[2]}:{frame.tb_lineno} {code.co_name}"
    return {**event, "error": f"{type(error).__name__}: {error}", "where": where}


def _open_null_as(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)
