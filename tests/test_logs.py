"""The log: lines that fit, hold no secret, and never stop or delay the program."""

import contextlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.logs import LINE_BYTES, LineWriter, configure, forward_library_logs, redact, render_human, render_json

TOKEN = "ql3w_cred-1_" + "S" * 43


class Pipe:
    """A pipe of which the test holds both ends."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def lines(self) -> list[str]:
        data = b""
        try:
            while chunk := os.read(self.reader, 1 << 20):
                data += chunk
        except BlockingIOError:
            pass
        return data.decode().splitlines()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]

    def close(self) -> None:
        for descriptor in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_an_event_is_one_json_line_with_time_level_and_name_first(pipe: Pipe) -> None:
    configure("info", fd=pipe.writer).warning("session_lost", worker="edge-1", generation=3, ids=["a", "b"], reason=None)

    [line] = pipe.lines()
    event = json.loads(line)
    assert list(event) == ["time", "level", "event", "worker", "generation", "ids", "reason"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
    assert (event["level"], event["event"], event["generation"], event["ids"]) == ("warning", "session_lost", 3, ["a", "b"])


@pytest.mark.parametrize(("level", "expected"), [("debug", 3), ("info", 3), ("warning", 2), ("error", 1)])
def test_events_below_the_level_are_left_out(pipe: Pipe, level: Any, expected: int) -> None:
    log = configure(level, fd=pipe.writer)
    log.info("a")
    log.warning("b")
    log.error("c")

    assert len(pipe.lines()) == expected


def test_a_terminal_gets_the_human_form_and_a_pipe_does_not(pipe: Pipe) -> None:
    controller, terminal = pty.openpty()
    try:
        configure("info", "auto", fd=terminal).info("run_started", run="run-1", note="two words")
        text = os.read(controller, 4096).decode().strip()
    finally:
        os.close(controller)
        os.close(terminal)
    configure("info", "auto", fd=pipe.writer).info("run_started")

    assert re.fullmatch(r'[0-9T:-]{19}Z info    run_started run=run-1 note="two words"', text)
    assert pipe.events()[0]["event"] == "run_started"


def test_the_form_can_be_chosen(pipe: Pipe) -> None:
    configure("info", "human", fd=pipe.writer).info("run_started", run="run-1")

    assert pipe.lines()[0].endswith("run_started run=run-1")


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "lease_token",
        "Authorization",
        "client_secret",
        "password",
        "private_key",
        "environment",
        "command",
        "argv",
        "leaseTokenDigest",
    ],
)
@pytest.mark.parametrize("format_", ["json", "human"])
def test_a_field_that_is_named_like_a_secret_loses_its_value(pipe: Pipe, name: str, format_: str) -> None:
    log = configure("info", format_, fd=pipe.writer)
    log.info("x", **{name: "HIDDEN"})
    log.info("x", **{name: ["HIDDEN"]})
    log.info("x", outer={"inner": {name: "HIDDEN"}}, listed=[{name: "HIDDEN"}])

    text = "\n".join(pipe.lines())
    assert "HIDDEN" not in text
    assert text.count("[redacted]") == 4


class Talkative:
    def __str__(self) -> str:
        return f"header Worker {TOKEN}"


@pytest.mark.parametrize(
    "value",
    [
        TOKEN,
        f"Worker {TOKEN} and more",
        ["a", TOKEN],
        {"a": {"b": TOKEN}},
        {"a": {"b": {"c": {"d": {"e": TOKEN}}}}},
        ValueError(f"bad header {TOKEN}"),
        Talkative(),
        TOKEN.encode(),
        bytearray(TOKEN.encode()),
        "x" * 230 + " " + TOKEN,
        "-----BEGIN PRIVATE KEY-----\nSSSSSSSS\n-----END PRIVATE KEY-----",
    ],
)
@pytest.mark.parametrize("format_", ["json", "human"])
def test_a_value_that_looks_like_a_secret_is_taken_out_wherever_it_stands(pipe: Pipe, value: object, format_: str) -> None:
    log = configure("info", format_, fd=pipe.writer)
    log.error("request_failed", reason=value)
    log.error(f"request_failed {value}" if isinstance(value, str) else "request_failed")

    assert "SSSS" not in "\n".join(pipe.lines())


def fail_with(text: str) -> None:
    raise ValueError(text)


def test_an_exception_is_told_by_type_text_and_place(pipe: Pipe) -> None:
    log = configure("info", "json", fd=pipe.writer)
    try:
        fail_with(f"no {TOKEN}")
    except ValueError as error:
        log.error("internal_error", exc_info=True)
        caught = error
    log.error("internal_error", exc_info=caught)
    log.error("internal_error", exc_info=True)

    first, second, third = pipe.events()
    assert first["error"] == second["error"] == "ValueError: no [redacted]"
    assert first["where"].startswith("test_logs.py:")
    assert "error" not in third


def test_odd_values_never_make_logging_raise(pipe: Pipe) -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    log = configure("info", "json", fd=pipe.writer)
    log.info("x", a=Mute(), b=2**70, c=float("nan"), d="\udcff", e=Path("/x"), f={1: {2}}, g=b"abc", h="a\nb\x00")

    [event] = pipe.events()
    assert event["a"] == "(Mute without a text)"
    assert event["b"] == str(2**70)
    assert event["d"] == "\\udcff"
    assert event["g"] == "(3 bytes)"


def test_a_human_line_holds_nothing_that_a_terminal_acts_on(pipe: Pipe) -> None:
    configure("info", "human", fd=pipe.writer).info("x", name="\x1b[2J\u202e\x9b\r\nfake line")

    [line] = pipe.lines()
    assert line.isprintable()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2000) | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=20), inner, max_size=10),
    max_leaves=20,
)


@given(
    event=st.text(max_size=1500),
    fields=st.dictionaries(st.from_regex(r"[a-z_]{1,30}", fullmatch=True), values, max_size=40),
)
def test_every_line_stays_below_900_bytes_and_json_stays_json(event: str, fields: dict[str, Any]) -> None:
    clean = redact({"time": "2026-01-01T00:00:00.000Z", "level": "warning", "event": event, **fields})

    line = render_json(clean)
    assert len(line.encode()) + 1 < LINE_BYTES
    assert json.loads(line)["level"] == "warning"
    assert "\n" not in line
    human = render_human(clean)
    assert len(human.encode()) + 1 < LINE_BYTES
    assert human.isprintable()


def test_long_texts_are_shortened_and_short_fields_stay(pipe: Pipe) -> None:
    configure("info", "json", fd=pipe.writer).info("x", run="run-1", a="é" * 5000, b="y" * 5000, c="z" * 5000, last=7)

    [event] = pipe.events()
    assert (event["run"], event["last"]) == ("run-1", 7)
    assert all(event[name].endswith("…") and len(event[name]) > 50 for name in "abc")


def test_a_full_pipe_drops_lines_and_tells_how_many_when_it_flows_again(pipe: Pipe) -> None:
    log = configure("info", "json", fd=pipe.writer)
    sent = 400
    for number in range(sent):
        log.info("filler", number=number, text="x" * 220)
    taken = pipe.events()
    log.info("after")
    notice, after = pipe.events()

    assert 0 < len(taken) < sent
    assert [event["number"] for event in taken] == list(range(len(taken)))
    assert (notice["event"], notice["level"], notice["count"]) == ("log_lines_dropped", "warning", sent - len(taken))
    assert after["event"] == "after"


def test_the_descriptor_is_left_in_blocking_mode(pipe: Pipe) -> None:
    configure("info", fd=pipe.writer).info("x")

    assert os.get_blocking(pipe.writer)


def test_a_reader_that_went_does_not_stop_the_program(pipe: Pipe) -> None:
    log = configure("info", fd=pipe.writer)
    log.info("before")
    os.close(pipe.reader)

    for _ in range(3):
        log.info("x")


def test_a_full_disk_drops_lines() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        log = configure("info", fd=full)
        log.error("a")
        log.error("b")
    finally:
        os.close(full)


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    lines = LineWriter(file, lambda count: f"dropped {count}")
    write = os.write

    def short_write(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", full_disk)
        return write(descriptor, data[:4])

    def full_disk(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "write", short_write)
    lines.write("first line")
    monkeypatch.setattr(os, "write", write)
    lines.write("second line")
    lines.write("third line")
    os.close(file)

    assert (tmp_path / "log").read_text().splitlines() == ["firs", "dropped 1", "second line", "third line"]


def run(script: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", script], check=False, timeout=60, **streams)


def test_a_closed_standard_error_never_takes_over_another_files_number(tmp_path: Path) -> None:
    script = f"""
import os
os.close(2)
from qlworker.logs import configure
log = configure("info")
journal = os.open({str(tmp_path / "journal")!r}, os.O_WRONLY | os.O_CREAT, 0o600)
log.info("x")
raise SystemExit(0 if journal != 2 else 3)
"""

    assert run(script).returncode == 0
    assert (tmp_path / "journal").read_bytes() == b""


def test_warnings_of_libraries_become_events_without_secrets() -> None:
    script = f"""
import logging
from qlworker.logs import configure, forward_library_logs
forward_library_logs(configure("info", "json"))
logging.getLogger("lib").info("not shown")
logging.getLogger("lib").warning("odd answer to %s", {TOKEN!r})
logging.getLogger("lib").error("broken %d", "format")
"""

    found = run(script, stderr=subprocess.PIPE)

    events = [json.loads(line) for line in found.stderr.splitlines()]
    assert [(event["event"], event["level"], event["library"]) for event in events] == [
        ("library_message", "warning", "lib"),
        ("library_message", "error", "lib"),
    ]
    assert events[0]["message"] == "odd answer to [redacted]"


def test_forwarding_adds_one_handler_of_its_own(pipe: Pipe) -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    forward_library_logs(configure("info", fd=pipe.writer))
    added = [handler for handler in root.handlers if handler not in before]
    for handler in added:
        root.removeHandler(handler)

    assert len(added) == 1
