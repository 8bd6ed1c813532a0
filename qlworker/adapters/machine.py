"""Facts about this box: architecture, cores, memory, disk and the interpreters that tasks may ask for.

Nothing is cached and nothing here changes from one start to the next on the same box: totals, not what is free.
"""

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..domain.capabilities import Dialect, InstalledRuntime, MachineFacts, describe

PROBE_S: Final = 2.0
"""How long all probes together may take, in seconds."""

_PROBE_BYTES: Final = 4096
_MIB: Final = 1024 * 1024
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")

# Name in the document -> program and the arguments that make it tell its version and end. No Java: asking it costs 100 MB.
_RUNTIMES: Final[Mapping[str, tuple[str, ...]]] = {
    "bash": ("bash", "--version"),
    "bun": ("bun", "--version"),
    "busybox": ("busybox",),
    "deno": ("deno", "--version"),
    "lua": ("lua", "-v"),
    "node": ("node", "--version"),
    "perl": ("perl", "-v"),
    "php": ("php", "--version"),
    "python": ("python3", "--version"),
    "ruby": ("ruby", "--version"),
}

_VERSION: Final = re.compile(r"(?<![0-9.])([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?")


class LocalMachine:
    """This box. `state_directory` need not exist yet; `path` is where interpreters are looked for."""

    def __init__(self, state_directory: Path, path: str) -> None:
        self._state_directory = state_directory
        self._path = path

    def facts(self) -> MachineFacts:
        """What is found now. Blocks for at most about 2 s: it starts every interpreter once. A number that cannot be told
        is 0, an interpreter that does not answer is left out."""
        return MachineFacts(
            machine=os.uname().machine,
            is_64_bit=sys.maxsize > 2**32,
            is_little_endian=sys.byteorder == "little",
            cpu_cores=min(_cpu_cores(), 4096),
            memory_bytes=_memory_bytes(),
            disk_bytes=_disk_bytes(self._state_directory),
            runtimes=_installed_runtimes(self._path),
        )

    def capabilities(self) -> Mapping[str, Any]:
        """The members of the baseline document, without labels and features. `facts` serves both dialects."""
        return describe(self.facts(), Dialect.BASELINE, {}, []).members()


def _cpu_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 0


def _memory_bytes() -> int:
    """The box's memory, or the container's limit where that is lower, in whole MiB."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
    with suppress(OSError, ValueError):
        total = min(total, int(_CGROUP_LIMIT.read_text("ascii")))
    return max(total, 0) // _MIB * _MIB


def _disk_bytes(directory: Path) -> int:
    """Size of the file system that holds, or will hold, `directory`, in whole MiB."""
    for candidate in (directory, *directory.parents):
        with suppress(OSError):
            found = os.statvfs(candidate)
            return found.f_blocks * found.f_frsize // _MIB * _MIB
    return 0


def _installed_runtimes(path: str) -> list[InstalledRuntime]:
    """The interpreters on `path` that tell a version within the time allowed for all of them."""
    probes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (program, *arguments) in _RUNTIMES.items():
            found = shutil.which(program, path=path)
            if found is not None:
                with suppress(OSError):
                    probes[name] = _start([found, *arguments])
        answers = _answers(probes, time.monotonic() + PROBE_S)
    finally:
        for probe in probes.values():
            _end(probe)
    versions = {name: _version(answer) for name, answer in answers.items()}
    return [InstalledRuntime(name=name, version=version) for name, version in sorted(versions.items()) if version is not None]


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    # nothing of the worker's reaches it: no environment, no descriptors, and a session of its own to be killed as a whole
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        cwd="/",
        start_new_session=True,
    )


def _answers(probes: Mapping[str, subprocess.Popen[bytes]], deadline: float) -> dict[str, bytes]:
    """The first 4 KiB that each probe wrote, of those that succeeded before `deadline`."""
    texts = dict.fromkeys(probes, b"")
    ended: list[str] = []
    with selectors.DefaultSelector() as selector:
        for name, probe in probes.items():
            if probe.stdout is not None:
                selector.register(probe.stdout, selectors.EVENT_READ, name)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _PROBE_BYTES)
                texts[key.data] = (texts[key.data] + chunk)[:_PROBE_BYTES]
                if not chunk:
                    selector.unregister(key.fileobj)
                    ended.append(key.data)
    return {name: texts[name] for name in ended if _succeeded(probes[name], deadline)}


def _succeeded(probe: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        return probe.wait(max(deadline - time.monotonic(), 0.0)) == 0
    except subprocess.TimeoutExpired:
        return False


def _end(probe: subprocess.Popen[bytes]) -> None:
    """Leaves nothing behind. Only a leader that is not reaped yet still gives its pid to its own group."""
    if probe.stdout is not None:
        probe.stdout.close()
    if probe.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(probe.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, for example on a dead network mount
        probe.wait(PROBE_S)


def _version(answer: bytes) -> str | None:
    """The first version in `answer` as a semantic one: two numbers get a third, zeros in front go."""
    found = _VERSION.search(answer.decode("ascii", "replace"))
    return None if found is None else ".".join(str(int(number or 0)) for number in found.groups())
