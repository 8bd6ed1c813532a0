"""The process above a user's command: holds it at a gate, waits for it, and publishes how it ended. It outlives the worker.

Run as `python -I -S launcher.py TITLE`; standard library only, nothing of qlworker. Readable in one sitting on purpose: this
is the contract that every other implementation of it must keep (tests/contract/test_launcher.py).

    fd 0  from the worker: 4 bytes big-endian length, a JSON plan, and later exactly one byte `G`; then end of file
    fd 1  to the worker: one line, {"held": PID OF THE COMMAND} or {"rejected": REASON}; then end of file
    fd 2  /dev/null

Before the line `held` the command's process exists but has executed nothing. The byte lets it run. End of file instead of the
byte (the worker died, or let go) means that it never runs, and the receipt says `not_started`; that ending is published in no
other case but a rejection. Whatever kills this program before the byte closes the inner gate too, so the command never runs.

After the byte it waits for its child alone: a grandchild that keeps the log open delays nothing. The receipt is written to a
temporary file, synced and linked to its name, so the first one wins and a reader sees a whole one or none. While that fails
(disk full, directory missing) it is tried again for ever, with pauses growing from 0.1 s to 5 s: a result is not given up.

It writes nothing into the command's log, except one line when the command cannot be executed.
"""

# pathlib and contextlib would cost every running command memory:
# ruff: noqa: PTH110, PTH118, PTH120, PTH208, SIM105

import errno
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable

PLAN_BYTES = 4 * 1024 * 1024
NOT_STARTED = 125  # the exit code of a receipt that says not_started; carries no meaning of its own
COMMAND_UMASK = 0o022  # what a login shell has; the launcher's own is 077
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

# errno of execve -> exit code as a shell gives it, reason in the receipt, text in the log
EXEC_FAILURES = {
    errno.ENOENT: (127, "command_not_found", "no such file or directory"),
    errno.EACCES: (126, "not_executable", "permission denied: not an executable file, or its file system is mounted noexec"),
    errno.ENOEXEC: (126, "not_a_program", "neither a program for this machine nor a script with #! in its first line"),
    errno.E2BIG: (126, "too_large", "its arguments and environment are larger than the kernel takes"),
}
NO_INTERPRETER = (127, "interpreter_not_found", "interpreter not found, or CRLF line endings in its first line")


class Rejected(Exception):
    """The command cannot be held. Nothing of the user's has run. The argument is the reason."""


class Plan:
    """What the worker wants. Raises ValueError, KeyError, TypeError or AttributeError for a text that is no plan."""

    def __init__(self, text: bytes) -> None:
        self.read_at_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        members = json.loads(text)
        self.run_id: str = members["run_id"]
        self.attempt_id: str = members["attempt_id"]
        self.callback_sequence: int = members["callback_sequence"]
        self.token: str = members["token"]
        self.started_at_ms: int = members["started_at_ms"]
        self.argv = [native(argument) for argument in members["argv"]]
        self.environment = {native(name): native(value) for name, value in members["environment"].items()}
        self.working_directory = native(members["working_directory"])
        self.output = native(members["output"])
        self.receipt = native(members["receipt"])
        if any(not name or b"=" in name for name in self.environment):
            raise ValueError("a variable must have a name without =")
        for path in (self.argv[0] if self.argv else b"", self.working_directory, self.output, self.receipt):
            if not path.startswith(b"/"):
                raise ValueError("every path must be absolute")

    def elapsed_ms(self) -> int:
        """Milliseconds since the plan was read; counts through suspend and ignores every step of the wall clock."""
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self.read_at_ns) // 1_000_000


def native(text: str) -> bytes:
    """`text` as the kernel wants it; bytes that were never UTF-8 come back as they were (surrogateescape)."""
    data = text.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise ValueError("a NUL cannot be handed to a program")
    return data


def stand_alone() -> None:
    """Leaves the worker's session, its signals, its directory and whatever descriptors it forgot to close."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # An ignored SIGCHLD would be inherited, and the kernel would throw the command's status away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.umask(0o077)
    try:
        inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        inherited = list(range(3, 1024))
    for descriptor in inherited:
        if descriptor > 2:
            quietly(os.close, descriptor)


def quietly(call: Callable[..., object], *arguments: object) -> None:
    """Calls where a failure changes nothing."""
    try:
        call(*arguments)
    except OSError:
        pass


def read_exactly(length: int) -> bytes:
    """`length` bytes of the worker's pipe, fewer at end of file."""
    data = bytearray()
    while len(data) < length and (more := os.read(0, min(length - len(data), 65536))):
        data += more
    return bytes(data)


def read_plan() -> Plan | None:
    """The plan, or None when the worker went away before it was whole."""
    length = int.from_bytes(read_exactly(4), "big")
    if length > PLAN_BYTES:
        raise Rejected("invalid_plan")
    text = read_exactly(length)
    if not text or len(text) < length:
        return None
    try:
        return Plan(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Rejected("invalid_plan") from None


def say(**line: object) -> None:
    """Tells the worker, once. A worker that is gone needs no answer."""
    quietly(os.write, 1, json.dumps(line).encode() + b"\n")
    os.dup2(2, 1)  # the worker sees end of file; nothing here writes to descriptor 1 again


def enter(plan: Plan) -> int:
    """Goes to the working directory and opens the log, so that both are decided before there is a command."""
    try:
        os.chdir(plan.working_directory)
    except PermissionError:
        raise Rejected("working_directory_denied") from None
    except OSError:
        raise Rejected("working_directory_missing") from None
    try:
        # O_NONBLOCK: a FIFO put there instead must fail, not hang.
        log = os.open(plan.output, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(log).st_mode):
            raise Rejected("output_unusable")
        os.set_blocking(log, True)
    except OSError:
        raise Rejected("output_unusable") from None
    return log


def hold(plan: Plan, log: int) -> tuple[int, int, int]:
    """Forks the command's process and waits until it stands at the gate: its pid, the inner gate and its report."""
    try:
        gate_read, gate = os.pipe()
        report, report_write = os.pipe()
        command = os.fork()
    except OSError:
        raise Rejected("resources") from None
    if command == 0:
        try:
            os.close(gate)  # or it would keep its own gate from ever reading end of file
            stand_at_gate(plan, log, gate_read, report_write)
        finally:
            os._exit(126)  # whatever happens, the copy never goes on as a second launcher
    for descriptor in (log, gate_read, report_write):
        os.close(descriptor)
    plan.argv, plan.environment = [], {}  # secrets are the command's business from here on
    os.chdir("/")
    if os.read(report, 1) != b"R":
        os.waitpid(command, 0)
        raise Rejected("resources")
    return command, gate, report


def stand_at_gate(plan: Plan, log: int, gate: int, report: int) -> None:
    """The command's process: makes itself what the command expects, waits for the byte, and becomes the command."""
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    os.umask(COMMAND_UMASK)
    null = os.open("/dev/null", os.O_RDWR)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.write(report, b"R")
    if os.read(gate, 1) != b"G":
        os._exit(NOT_STARTED)
    path = plan.argv[0]
    try:
        os.execve(path, plan.argv, plan.environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        failure = error.errno or 0
        code, reason, text = EXEC_FAILURES.get(failure, (126, "exec_failed", os.strerror(failure).lower()))
        if failure == errno.ENOENT and os.path.exists(path):
            code, reason, text = NO_INTERPRETER
        quietly(os.write, report, reason.encode())
        quietly(os.write, 2, b"qlworker: cannot start " + path.replace(b"\n", b"?") + b": " + text.encode() + b"\n")
        os._exit(code)


def watch(command: int, gate: int, report: int) -> dict[str, object]:
    """Waits for the worker's byte and then for the command: how it ended, as members of the receipt."""
    opened = os.read(0, 1) == b"G"
    if opened:
        quietly(os.write, gate, b"G")  # fails if it was killed while it was held; its status tells
    else:
        os.kill(command, signal.SIGKILL)
    os.close(gate)
    status = os.waitpid(command, 0)[1]
    if not opened:
        return {"ending": "not_started", "exitCode": NOT_STARTED, "reason": "gate_closed"}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {"ending": "signaled", "exitCode": 128 + number, "signal": number}
    ending: dict[str, object] = {"ending": "exited", "exitCode": os.WEXITSTATUS(status)}
    # Only the held process could write here, and execve closed it: a word means that execve failed.
    if reason := os.read(report, 64).decode():
        ending["reason"] = reason
    return ending


def receipt_of(plan: Plan, ending: dict[str, object]) -> bytes:
    """The receipt, schema 2 of qlworker/domain/receipt.py, in its member order."""
    members: dict[str, object] = {
        "schemaVersion": 2,
        "runId": plan.run_id,
        "attemptId": plan.attempt_id,
        "callbackSequence": plan.callback_sequence,
        "token": plan.token,
        "startedAtMs": plan.started_at_ms,
        "finishedAtMs": plan.started_at_ms + plan.elapsed_ms(),
    }
    for name in ("exitCode", "ending", "signal", "reason"):
        if name in ending:
            members[name] = ending[name]
    return json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()


def publish(plan: Plan, data: bytes) -> None:
    """Makes the receipt durable under its name, once. Raises OSError when it could not; nothing half-made stays."""
    directory = os.path.dirname(plan.receipt)
    name = f".{plan.attempt_id}.{os.urandom(16).hex()}.tmp"
    temporary = os.path.join(directory, native(name))
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
            os.fsync(file)
        finally:
            os.close(file)
        if not os.path.lexists(plan.receipt):  # the first one wins; link() refuses the second of two at once
            os.link(temporary, plan.receipt)
    finally:
        quietly(os.unlink, temporary)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    quietly(os.fsync, folder)  # some file systems cannot; the receipt is there, only a power cut may still take it (R50)
    os.close(folder)


def publish_surely(plan: Plan, data: bytes) -> None:
    """Publishes, however long it takes."""
    pause = FIRST_PAUSE_S
    while True:
        try:
            return publish(plan, data)
        except OSError:
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)


def main() -> int:
    """Exit status 0 once the receipt is published or the worker was told; 1 when there was no plan."""
    stand_alone()
    plan = None
    try:
        plan = read_plan()
        if plan is None:
            return 1
        command, gate, report = hold(plan, enter(plan))
    except Rejected as rejection:
        reason = str(rejection)
        if plan is not None:
            # For a worker that dies before it has read the line: proof that nothing ran. Tried once, the line is the answer.
            quietly(publish, plan, receipt_of(plan, {"ending": "not_started", "exitCode": NOT_STARTED, "reason": reason}))
        say(rejected=reason)
        return 0
    say(held=command)
    publish_surely(plan, receipt_of(plan, watch(command, gate, report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
