"""What became of a run, judged from what is on disk and what the control plane says, and the sum over many runs."""

from enum import StrEnum

import msgspec

from .faults import Outcome


class Expected(msgspec.Struct, frozen=True):
    """How the run's command ends when it is let run: the control plane's status for it, and the exit code, None when it
    cannot be run. `may_be_refused` when the box may have had no room to start it."""

    status: str
    exit_code: int | None
    may_be_refused: bool = False


class Seen(msgspec.Struct, frozen=True):
    """The facts of one attempt after everybody had the time to converge.

    `started` and `ended` count the command's own lines. `receipt` says whether a receipt lies there now, `plan_sent` whether
    the launcher certainly had its whole plan. `record` is None when retention took the settled record away.
    """

    run_id: str
    attempt_id: str
    status: str
    is_over: bool
    exit_code: int | None
    error_code: str | None
    started: int
    ended: int
    record: str | None
    is_behind_barrier: bool
    has_handle: bool
    has_receipt: bool
    plan_sent: bool


class Fault(StrEnum):
    """What must never be."""

    DOUBLE = "double"
    LOST_COMPLETION = "lost completion"
    WRONG_EXIT_CODE = "wrong exit code"
    UNKNOWN_NOT_ALLOWED = "unknown where it could be proven"


def outcome(seen: Seen) -> Outcome | None:
    """What the run came to; None when it came to nothing."""
    if seen.is_over:
        return Outcome.NOT_STARTED if seen.error_code == "EXECUTOR_START_FAILED" else Outcome.RAN
    return Outcome.UNKNOWN if seen.record == "recovery_required" else None


def faults(seen: Seen, expected: Expected, allowed: frozenset[Outcome] | None = None) -> list[Fault]:
    """Which promises were broken. `allowed` is what the point of a killing leaves open; None when the moment was random: then
    an unknown is allowed where the table of design.md §2 allows it for a launcher that nobody killed."""
    found = []
    came_to = outcome(seen)
    if seen.started > 1:
        found.append(Fault.DOUBLE)
    if came_to is Outcome.RAN and ((seen.status, seen.exit_code) != (expected.status, expected.exit_code) or not seen.started):
        found.append(Fault.WRONG_EXIT_CODE)
    # Behind the barrier a killing explains it; before the barrier the run is simply tried again.
    explained = seen.is_behind_barrier or expected.may_be_refused or expected.exit_code is None
    if came_to is Outcome.NOT_STARTED and (seen.started or not explained):
        found.append(Fault.WRONG_EXIT_CODE)
    unknown_allowed = Outcome.UNKNOWN in allowed if allowed is not None else may_be_unknown(seen)
    if came_to is None or (came_to is Outcome.UNKNOWN and not unknown_allowed):
        found.append(Fault.LOST_COMPLETION if seen.ended or seen.has_receipt else Fault.UNKNOWN_NOT_ALLOWED)
    elif allowed is not None and came_to not in allowed:
        found.append(Fault.WRONG_EXIT_CODE if came_to is Outcome.RAN else Fault.UNKNOWN_NOT_ALLOWED)
    return found


def may_be_unknown(seen: Seen) -> bool:
    """Only between the barrier on disk and the launcher with its whole plan; one that has it publishes, come what may."""
    return not (seen.started or seen.has_handle or seen.has_receipt or seen.plan_sent)


class Tally(msgspec.Struct):
    """The one line. `notes` are for the reader of a failure."""

    rounds: int = 0
    kills: int = 0
    executions: int = 0
    doubles: int = 0
    lost_completions: int = 0
    unknown: int = 0
    unknown_not_allowed: int = 0
    wrong_exit_codes: int = 0
    notes: list[str] = []

    def count(self, seen: Seen, expected: Expected, allowed: frozenset[Outcome] | None, where: str) -> None:
        """Adds one run."""
        self.executions += seen.started
        self.unknown += outcome(seen) is Outcome.UNKNOWN
        found = faults(seen, expected, allowed)
        self.doubles += Fault.DOUBLE in found
        self.lost_completions += Fault.LOST_COMPLETION in found
        self.wrong_exit_codes += Fault.WRONG_EXIT_CODE in found
        self.unknown_not_allowed += Fault.UNKNOWN_NOT_ALLOWED in found
        self.notes += [f"{where}: {fault}: {seen}, expected {expected}" for fault in found]

    def add(self, other: "Tally") -> None:
        """Adds another tally."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return not self.notes

    def line(self, seconds: float) -> str:
        """The line that `make crash` prints."""
        unknown = f"{self.unknown} unknown" + (f" ({self.unknown_not_allowed} not allowed)" if self.unknown_not_allowed else "")
        return (
            f"{self.rounds} rounds, {self.kills} kills, {self.executions} executions, {self.doubles} doubles, "
            f"{self.lost_completions} lost completions, {unknown}, {self.wrong_exit_codes} wrong exit codes, {seconds:.0f} s"
        )
