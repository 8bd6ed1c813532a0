"""The control plane's log: one JSON object per line on standard error, one event name per fact, never a secret."""

import sys
import time
from typing import IO, Final, Protocol

import msgspec

LINE_BYTES: Final = 900

_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


class Log(Protocol):
    """Where events go."""

    def info(self, event: str, **fields: object) -> None:
        """Something that happened."""

    def error(self, event: str, **fields: object) -> None:
        """Something that needs an operator."""


class JsonLog:
    """The log on a stream. A line longer than 900 bytes loses its fields and says so; a stream that is gone is not
    an error: losing a log line must never lose a request."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream

    def info(self, event: str, **fields: object) -> None:
        """Something that happened."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something to look at, handled."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Something that needs an operator."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        head: dict[str, object] = {"at_ms": time.time_ns() // 1_000_000, "level": level, "event": event}
        line = _ENCODER.encode(head | fields)
        if len(line) > LINE_BYTES:
            line = _ENCODER.encode(head | {"fields_dropped": len(fields)})
        try:
            self._stream.write(line.decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return
