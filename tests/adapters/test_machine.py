"""The facts of this box, and interpreters that lie, hang, fail or talk too much."""

import os
import sys
from pathlib import Path

import pytest

from qlworker.adapters.machine import LocalMachine
from qlworker.adapters.process_table import every_stat
from qlworker.domain.capabilities import Capabilities, Dialect, InstalledRuntime, describe


def program(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def found(tmp_path: Path) -> dict[str, str]:
    facts = LocalMachine(tmp_path, str(tmp_path)).facts()
    return {runtime.name: runtime.version for runtime in facts.runtimes}


def test_the_numbers_are_those_of_this_box(tmp_path: Path) -> None:
    facts = LocalMachine(tmp_path, "").facts()
    disk = os.statvfs(tmp_path)

    assert facts.machine == os.uname().machine
    assert facts.is_64_bit is (sys.maxsize > 2**32)
    assert facts.cpu_cores == len(os.sched_getaffinity(0))
    assert 0 < facts.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= disk.f_blocks * disk.f_frsize - facts.disk_bytes < 1024 * 1024
    assert facts.runtimes == []


def test_the_document_is_byte_equal_from_one_start_to_the_next(tmp_path: Path) -> None:
    program(tmp_path, "python3", "echo Python 3.11.7")
    first = describe(LocalMachine(tmp_path, str(tmp_path)).facts(), Dialect.BASELINE, {}, []).text()
    (tmp_path / "grown").write_bytes(b"x" * 5_000_000)
    second = describe(LocalMachine(tmp_path, str(tmp_path)).facts(), Dialect.BASELINE, {}, []).text()

    assert first == second
    assert '{"name":"python","version":"3.11.7"}' in first


def test_the_state_directory_need_not_exist_yet(tmp_path: Path) -> None:
    assert LocalMachine(tmp_path / "a" / "b", "").facts().disk_bytes == LocalMachine(tmp_path, "").facts().disk_bytes


def test_the_port_gets_the_members_of_a_valid_document(tmp_path: Path) -> None:
    members = LocalMachine(tmp_path, "/usr/bin:/bin").capabilities()

    assert members["operatingSystem"] == "linux"
    assert members["executors"] == ["remote-worker"]
    assert Capabilities.parse(Capabilities(architecture=members["architecture"], executors=["remote-worker"]).text())


@pytest.mark.parametrize(
    ("name", "runtime", "answer", "version"),
    [
        ("python3", "python", "Python 3.11.7", "3.11.7"),
        ("node", "node", "v24.14.0", "24.14.0"),
        ("bash", "bash", "GNU bash, version 5.2.15(1)-release (x86_64-pc-linux-gnu)", "5.2.15"),
        ("busybox", "busybox", "BusyBox v1.36.1 (2024-01-01 00:00:00 UTC) multi-call binary.", "1.36.1"),
        ("perl", "perl", "This is perl 5, version 36, subversion 0 (v5.36.0) built for x", "5.36.0"),
        ("ruby", "ruby", "ruby 3.1.2p20 (2022-04-12 revision 4491bb740a) [x86_64-linux-gnu]", "3.1.2"),
        ("lua", "lua", "Lua 5.4  Copyright (C) 1994-2022 Lua.org, PUC-Rio", "5.4.0"),
        ("deno", "deno", "deno 01.02.03", "1.2.3"),
    ],
)
def test_a_version_is_found_in_what_an_interpreter_says(
    tmp_path: Path, name: str, runtime: str, answer: str, version: str
) -> None:
    program(tmp_path, name, f"echo '{answer}'")

    assert found(tmp_path) == {runtime: version}


def test_a_version_told_on_standard_error_counts(tmp_path: Path) -> None:
    program(tmp_path, "lua", "echo Lua 5.1.5 >&2")

    assert found(tmp_path) == {"lua": "5.1.5"}


def test_interpreters_that_fail_or_say_nothing_are_left_out(tmp_path: Path) -> None:
    program(tmp_path, "bash", "echo 1.2.3; exit 1")
    program(tmp_path, "node", "echo no version here")
    program(tmp_path, "perl", "true")
    program(tmp_path, "ruby", "kill -9 $$")
    (tmp_path / "php").write_text("#!/nowhere/interpreter\n")
    (tmp_path / "php").chmod(0o755)
    (tmp_path / "lua").write_text("not executable")
    program(tmp_path, "python3", "echo Python 3.9.1")

    assert found(tmp_path) == {"python": "3.9.1"}


def test_interpreters_that_hang_are_left_out_and_leave_nothing_behind(tmp_path: Path) -> None:
    program(tmp_path, "bash", f"echo $$ > {tmp_path}/pid; echo 5.2.15; /bin/sleep 1000 & /bin/sleep 1000")
    program(tmp_path, "node", "echo v24.14.0; exec >&- 2>&-; exec /bin/sleep 1000")
    program(tmp_path, "python3", "echo Python 3.9.1")

    assert found(tmp_path) == {"python": "3.9.1"}
    leader = int((tmp_path / "pid").read_text())
    assert [stat for stat in every_stat() if stat.session == leader and not stat.is_dead] == []


def test_an_interpreter_that_talks_without_end_is_left_out(tmp_path: Path) -> None:
    program(tmp_path, "bash", "while :; do echo 5.2.15; done")

    assert found(tmp_path) == {}


def test_an_interpreter_gets_no_environment_and_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QL_SECRET", "1")
    program(tmp_path, "node", '[ -z "$QL_SECRET" ] && ! read line && [ "$(pwd)" = / ] && echo v1.0.0')

    assert found(tmp_path) == {"node": "1.0.0"}


def test_runtimes_come_sorted(tmp_path: Path) -> None:
    for name in ("ruby", "bash", "python3"):
        program(tmp_path, name, "echo 1.0.0")

    assert LocalMachine(tmp_path, str(tmp_path)).facts().runtimes == [
        InstalledRuntime(name=name, version="1.0.0") for name in ("bash", "python", "ruby")
    ]
