"""`qlworker journal`: real journals made by FileJournal, real owners, real processes; nothing secret is ever printed."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from qlworker import cli
from qlworker.adapters import process_table
from qlworker.adapters.clock import SystemClock
from qlworker.adapters.journal import FileJournal
from qlworker.adapters.journal_snapshot import JournalSnapshot, Quarantine
from qlworker.adapters.ownership import JournalOwnership
from qlworker.domain.advice import advise, cost_of_quarantine
from qlworker.domain.audit import RecordClass
from qlworker.domain.canonical import b64u, callback_token_digest, lease_token_digest
from qlworker.domain.claim import PendingClaim
from qlworker.domain.errors import Conflict, Corrupt, OwnershipLost
from qlworker.domain.identity import DurableHandle, Presence, ProcessId
from qlworker.domain.record import SETTLED, Event, InboxRecord, RecoveryReason, State, accept, advance
from qlworker.domain.revision import Binding, ShellCommand
from tests.adapters.recorded_calls import record_calls
from tests.builders import SESSION_ID, TOKEN, make_offer, make_record, make_revision

PROJECT = Path(__file__).parents[1]
CAPABILITY = bytes(range(32))
LOG = "wlog-" + "a" * 30
STARTED_MS = 5000

# Takes the journal as a worker does and keeps it until the end of its input.
OWNER = """
import sys, trio
from pathlib import Path
from qlworker.adapters import process_table
from qlworker.adapters.clock import SystemClock
from qlworker.adapters.ownership import JournalOwnership

async def main():
    state = Path(sys.argv[1])
    place = process_table.read_place(process_table.read_host_id(state / "installation-id"))
    ownership = JournalOwnership(state / "journal", clock=SystemClock(place.boot_id), place=place,
        me=process_table.myself(), is_alive=process_table.is_alive)
    await ownership.acquire()
    print("owned", flush=True)
    sys.stdin.read()

trio.run(main)
"""

# The steps of a record, each with the members it brings.
BARRIER = {
    "executor_started_at_ms": STARTED_MS,
    "log_artifact_id": LOG,
    "completion_receipt_callback_sequence": 1,
    "completion_receipt_token_digest": callback_token_digest(CAPABILITY),
}
UNKNOWN = {"recovery_reason": RecoveryReason.LAUNCH_OUTCOME_UNKNOWN}
Step = tuple[Event, dict[str, Any]]


def steps_to(state: State, handle: str = "ql3lp1.not-a-handle") -> list[Step]:
    acked, raised = (Event.STARTING_ACKED, {}), (Event.BARRIER_RAISED, BARRIER)
    recorded = (Event.HANDLE_RECORDED, {"executor_handle": handle})
    failed = (Event.NOT_STARTED, {})
    ways: dict[State, list[Step]] = {
        State.ACCEPTED: [],
        State.STARTING_ACKNOWLEDGED: [acked],
        State.LAUNCHING: [acked, raised],
        State.STARTED: [acked, raised, recorded],
        State.RUNNING_ACKNOWLEDGED: [acked, raised, recorded, (Event.RUNNING_ACKED, {})],
        State.START_FAILED: [acked, failed],
        State.START_FAILURE_ACKNOWLEDGED: [acked, failed, (Event.FAILURE_ACKED, {})],
        State.COMPLETION_ACKNOWLEDGED: [
            acked,
            raised,
            recorded,
            (Event.COMPLETION_ACKED, {"completion_acknowledged_at_ms": 9000}),
        ],
        State.RECOVERY_REQUIRED: [acked, raised, (Event.RECOVERY_NEEDED, UNKNOWN)],
    }
    return ways[state]


class Box:
    """A configured worker's directories, its journal, and the command under test."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = root / "state"
        self.journal = self.state / "journal"
        self.state.mkdir(mode=0o700)
        (self.state / "installation-id").write_text("0123456789abcdef\n")
        self.config = root / "qlworker.toml"
        self.config.write_text(f"""
[worker]
id = "edge-1"
[control_plane]
origin = "https://127.0.0.1:1"
[credentials]
certificate = "/nowhere/c"
key = "/nowhere/k"
trust_anchors = "/nowhere/a"
token = "/nowhere/t"
[state]
directory = "{self.state}"
""")
        self.place = process_table.read_place(process_table.read_host_id(self.state / "installation-id"))
        self._capsys = capsys

    def ownership(self) -> JournalOwnership:
        return JournalOwnership(
            self.journal,
            clock=SystemClock(self.place.boot_id),
            place=self.place,
            me=process_table.myself(),
            is_alive=process_table.is_alive,
        )

    def as_worker(self, action: Callable[[FileJournal], Awaitable[Any]]) -> Any:
        """Does `action` with the journal opened by its owner."""

        async def main() -> Any:
            ownership = self.ownership()
            await ownership.acquire()
            try:
                journal = FileJournal(self.journal, ownership=ownership, file_limiter=trio.CapacityLimiter(1))
                await journal.open()
                return await action(journal)
            finally:
                await ownership.release()

        return trio.run(main)

    def put(self, offer_id: str, state: State = State.ACCEPTED, *, handle: str = "ql3lp1.no", **changes: Any) -> InboxRecord:
        async def create(journal: FileJournal) -> InboxRecord:
            record = make_record(offer_id, **changes)
            await journal.create(record)
            for event, members in steps_to(state, handle):
                record = advance(record, event, 2000, **members)
                await journal.replace(record)
            return record

        record: InboxRecord = self.as_worker(create)
        return record

    def opens_with(self) -> list[str]:
        """The offers of the journal, as a worker finds them."""

        async def page(journal: FileJournal) -> list[str]:
            return [record.offer_id for record in (await journal.page()).records]

        offers: list[str] = self.as_worker(page)
        return offers

    def file(self, name: str) -> Path:
        return self.journal / "offers" / name

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = cli.main(["journal", arguments[0], "--config", str(self.config), *arguments[1:]])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def rows(self) -> list[dict[str, Any]]:
        code, out, err = self.run("list", "--json")
        assert (code, err) == (0, "")
        rows: list[dict[str, Any]] = json.loads(out)["records"]
        return rows

    def facts(self, offer_id: str) -> dict[str, Any]:
        code, out, err = self.run("show", offer_id, "--json")
        assert (code, err) == (0, "")
        facts: dict[str, Any] = json.loads(out)
        return facts

    def quarantined(self) -> dict[str, bytes]:
        directory = self.journal / "quarantine"
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())} if directory.exists() else {}

    def contents(self) -> dict[str, bytes]:
        """Every file of the state directory but the guard, which a lock may leave behind empty."""
        files = (path for path in sorted(self.state.rglob("*")) if path.is_file() and path.name != ".owner.guard")
        return {str(path): path.read_bytes() for path in files}

    @contextmanager
    def owned_by_another(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", OWNER, str(self.state)]
        with subprocess.Popen(command, cwd=PROJECT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == "owned\n"
                yield child
            finally:
                child.kill()

    def handle(self, pid: int) -> str:
        """A handle of a launcher and a command that are both process `pid`."""
        stat = process_table.read_stat(pid)
        process = ProcessId(pid, "1") if stat is None else stat.process
        return DurableHandle.of("handle-1", self.place, process, process).text()

    def receipt(self, token: bytes = CAPABILITY, **changes: Any) -> Path:
        members = {
            "schemaVersion": 2,
            "runId": "run-1",
            "attemptId": "attempt-1",
            "callbackSequence": 1,
            "token": b64u(token),
            "startedAtMs": STARTED_MS,
            "finishedAtMs": STARTED_MS + 1,
            "exitCode": 3,
            "ending": "exited",
        }
        path = self.state / "receipts" / "at" / "attempt-1.json"
        path.parent.mkdir(mode=0o700, parents=True)
        path.parent.parent.chmod(0o700)
        path.write_text(json.dumps(members | changes))
        path.chmod(0o600)
        return path


@pytest.fixture
def box(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Box:
    return Box(tmp_path, capsys)


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input ends."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        yield child


def make_claim(offer_id: str) -> PendingClaim:
    return PendingClaim(
        schema_version=1,
        revision=0,
        worker_id="edge-1",
        worker_session_id=SESSION_ID,
        worker_generation=2,
        offer_id=offer_id,
        lease_token=TOKEN,
        attempt_count=0,
        created_at_ms=1000,
        updated_at_ms=1000,
        last_attempt_at_ms=None,
        next_attempt_at_ms=1000,
    )


# The words


CLASSES = {
    State.ACCEPTED: RecordClass.NO_LOCAL_EXECUTION,
    State.STARTING_ACKNOWLEDGED: RecordClass.NO_LOCAL_EXECUTION,
    State.START_FAILED: RecordClass.NO_LOCAL_EXECUTION,
    State.LAUNCHING: RecordClass.LAUNCH_UNKNOWN,
    State.RECOVERY_REQUIRED: RecordClass.LAUNCH_UNKNOWN,
    State.STARTED: RecordClass.POSSIBLE_LOCAL_OWNERSHIP,
    State.RUNNING_ACKNOWLEDGED: RecordClass.POSSIBLE_LOCAL_OWNERSHIP,
    State.START_FAILURE_ACKNOWLEDGED: RecordClass.SETTLED_START_FAILURE,
    State.COMPLETION_ACKNOWLEDGED: RecordClass.SETTLED_COMPLETION,
}
EVERY_CASE = [(state, None) for state in State if state is not State.RECOVERY_REQUIRED] + [
    (State.RECOVERY_REQUIRED, reason) for reason in RecoveryReason
]


@pytest.mark.parametrize(("state", "reason"), EVERY_CASE)
def test_every_state_and_reason_has_its_class_and_a_next_step(state: State, reason: RecoveryReason | None) -> None:
    advice = advise(state, reason)

    assert advice.record_class is CLASSES[state]
    assert 20 < len(advice.next_step) < 200
    assert ("quarantine" in advice.next_step) is (state is State.RECOVERY_REQUIRED)


def test_every_reason_has_words_of_its_own() -> None:
    assert len({advise(State.RECOVERY_REQUIRED, reason).next_step for reason in RecoveryReason}) == len(RecoveryReason)


@pytest.mark.parametrize("state", [*sorted(set(State) - SETTLED), None])
@pytest.mark.parametrize("presence", [None, *Presence])
def test_what_may_run_unwatched_is_said_unless_it_is_known_to_be_over(state: State | None, presence: Presence | None) -> None:
    reason = RecoveryReason.LAUNCH_OUTCOME_UNKNOWN if state is State.RECOVERY_REQUIRED else None
    said = "\n".join(cost_of_quarantine(state, reason, presence, has_genuine_receipt=False))

    assert "the run becomes lost when its lease ends" in said
    assert "genuine receipt" not in said
    may_run = state is None or state in {
        State.LAUNCHING,
        State.STARTED,
        State.RUNNING_ACKNOWLEDGED,
        State.RECOVERY_REQUIRED,
    }
    if presence in (Presence.RUNNING, Presence.PENDING):
        assert "its command runs and goes on unwatched" in said
    else:
        is_over = state is not None and presence in {Presence.EXITED, Presence.OTHER_BOOT}
        assert ("cannot be told" in said) is (may_run and not is_over)


def test_a_proven_result_is_said_to_be_worth_waiting_for() -> None:
    said = cost_of_quarantine(State.STARTED, None, Presence.EXITED, has_genuine_receipt=True)

    assert any("genuine receipt" in line for line in said)


def test_a_run_that_the_control_plane_ended_is_not_called_lost() -> None:
    said = cost_of_quarantine(
        State.RECOVERY_REQUIRED, RecoveryReason.CONTROL_PLANE_TERMINAL, Presence.EXITED, has_genuine_receipt=False
    )

    assert not any("lost" in line for line in said)


# list


def test_every_state_is_listed_with_ids_class_age_and_next_step(box: Box) -> None:
    for number, state in enumerate(State):
        box.put(f"offer-{number}", state, run_id=f"run-{number}", attempt_id=f"attempt-{number}")

    rows = box.rows()

    assert [row["state"] for row in rows] == list(State)
    for number, row in enumerate(rows):
        assert (row["offerId"], row["runId"], row["attemptId"]) == tuple(
            f"{each}-{number}" for each in ("offer", "run", "attempt")
        )
        state = State(row["state"])
        assert row["class"] == CLASSES[state]
        assert row["reason"] == ("launch_outcome_unknown" if state is State.RECOVERY_REQUIRED else None)
        assert row["ageMs"] > 0
        assert row["damage"] is None
    code, out, err = box.run("list")
    assert (code, err) == (0, "")
    for row in rows:
        for word in ("offerId", "runId", "attemptId", "state", "class", "nextStep"):
            assert row[word] in out


def test_the_columns_of_the_list_stand_below_one_another(box: Box) -> None:
    box.put("a-very-long-offer-id-0123456789", State.RECOVERY_REQUIRED)
    box.put("short")
    lines = [line for line in box.run("list")[1].splitlines() if not line.startswith("    ")]

    assert len(lines) == 3
    column = lines[0].index("CLASS")
    assert [line[column - 1 : column + 5].strip() for line in lines] == ["CLASS", "launc", "no_kn"]


def test_an_empty_journal_says_so(box: Box) -> None:
    assert box.opens_with() == []

    assert box.run("list") == (0, f"journal {box.journal} holds no records\n", "")
    assert box.rows() == []


@pytest.mark.parametrize("arguments", [["list"], ["show", "x"], ["quarantine", "x", "--yes"]])
def test_a_journal_that_is_not_there_is_said_and_not_made(box: Box, arguments: list[str]) -> None:
    code, out, err = box.run(*arguments)

    assert (code, out) == (1, "")
    assert err.startswith(f"qlworker: there is no journal at {box.journal}")
    assert not box.journal.exists()


def test_listing_and_showing_need_no_ownership_and_change_nothing_while_a_worker_runs(box: Box) -> None:
    box.put("offer-1")
    box.put("offer-2", State.LAUNCHING)
    with box.owned_by_another():
        before = box.contents()
        assert [row["offerId"] for row in box.rows()] == ["offer-1", "offer-2"]
        assert box.facts("offer-2")["state"] == "launching"
        assert box.contents() == before


def test_a_box_whose_clock_is_behind_does_not_make_up_an_age(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put("offer-1", now_ms=2_000_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: 0)

    assert box.rows()[0]["ageMs"] is None
    assert "unknown" in box.run("list")[1].splitlines()[1]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[:400]),
    "zeros": lambda path: path.write_bytes(b"\x00" * 400),
    "not text": lambda path: path.write_bytes(path.read_bytes().replace(b"offer-2", b"offer-\xff")),
    "another state": lambda path: path.write_bytes(path.read_bytes().replace(b'"accepted"', f'"{TOKEN}"'.encode())),
    "another offer": lambda path: path.write_bytes(path.read_bytes().replace(b'"offer-2"', b'"offer-9"')),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b" " * 200_000),
    "open to others": lambda path: path.chmod(0o644),
    "symbolic link": lambda path: (path.rename(path.parents[1] / "elsewhere"), path.symlink_to("../elsewhere")),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "directory": lambda path: (path.unlink(), path.mkdir(0o700)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_record_is_listed_beside_the_sound_ones_and_its_quarantine_lets_the_worker_start(
    box: Box, damage: Callable[[Path], object]
) -> None:
    for number in (1, 2, 3):
        box.put(f"offer-{number}")
    damage(box.file("offer-2.json"))
    with pytest.raises(Corrupt):
        box.opens_with()

    first, second, third = box.rows()
    assert (first["state"], third["state"]) == ("accepted", "accepted")
    assert (second["offerId"], second["file"], second["state"]) == ("offer-2", "offer-2.json", None)
    assert second["damage"]
    assert "quarantine offer-2.json" in second["nextStep"] or "offer-2.json is" in second["nextStep"]
    assert TOKEN not in json.dumps(second)
    code, out, _ = box.run("list")
    assert code == 0
    assert "damaged" in out
    code, out, err = box.run("show", "offer-2")
    assert (code, out) == (3, "")
    assert "offer-2.json" in err
    assert TOKEN not in err

    code, out, err = box.run("quarantine", "offer-2.json", "--yes")
    assert (code, err) == (0, "")
    assert "what the damaged record knew" in out
    assert box.opens_with() == ["offer-1", "offer-3"]
    assert [path.name for path in (box.journal / "quarantine").iterdir()] == ["offer-2.json"]


def test_a_file_that_is_no_record_is_listed_without_steering_the_terminal_and_can_be_set_aside(box: Box) -> None:
    box.put("offer-1")
    name = "own-notes\x1b[2J.txt"
    box.file(name).touch(0o600)
    with pytest.raises(Corrupt):
        box.opens_with()

    assert [row["damage"] for row in box.rows()] == [None, "is not a record of the journal"]
    outputs = [*box.run("list"), *box.run("quarantine", name, "--yes")]
    assert "\x1b" not in "".join(str(each) for each in outputs)
    assert box.opens_with() == ["offer-1"]
    assert list(box.quarantined()) == [name]


@pytest.mark.parametrize("name", ["pending-claim.json", "session.json"])
def test_a_damaged_claim_or_session_is_listed_and_can_be_set_aside_but_a_sound_one_cannot(box: Box, name: str) -> None:
    box.as_worker(lambda journal: journal.write_claim(make_claim("offer-7")))
    if name == "pending-claim.json":
        assert box.rows() == []
        code, _, err = box.run("quarantine", name, "--yes")
        assert (code, err) == (1, f"qlworker: {name} is in order: there is nothing to set aside\n")
        assert box.run("show", name)[0] == 1
    (box.journal / name).write_text(f'{{"leaseToken":"{TOKEN}"')
    (box.journal / name).chmod(0o600)

    (row,) = box.rows()
    assert (row["file"], row["damage"], row["offerId"]) == (name, "is damaged", None)
    code, out, err = box.run("quarantine", name, "--yes")
    assert (code, err) == (0, "")
    assert TOKEN not in out
    assert list(box.quarantined()) == [name]
    assert not (box.journal / name).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("arguments", [["list"], ["show", "offer-1"], ["quarantine", "offer-1", "--yes"]])
def test_the_journal_of_another_user_is_left_alone(box: Box, arguments: list[str]) -> None:
    box.put("offer-1")
    os.chown(box.journal, 4711, 4711)
    before = box.contents()

    code, out, err = box.run(*arguments)

    assert (code, out) == (2, "")
    assert err == f"qlworker: journal {box.journal} belongs to user 4711: run this as that user\n"
    assert box.contents() == before


# show


def test_the_facts_of_a_record_are_shown(box: Box) -> None:
    record = box.put("offer-1", State.STARTED, lease_version=4)
    output = box.state / "output" / "aa" / f"{LOG}.log"
    output.parent.mkdir(parents=True)
    output.write_text("twelve bytes")

    facts = box.facts("offer-1")

    assert facts == {
        "offerId": "offer-1",
        "runId": "run-1",
        "attemptId": "attempt-1",
        "attemptNumber": 1,
        "taskId": "task-1",
        "state": "started",
        "class": "possible_local_ownership",
        "reason": None,
        "revision": record.revision,
        "acceptedAtMs": 1000,
        "updatedAtMs": 2000,
        "leaseVersion": 4,
        "leaseExpiresAtMs": 30_020,
        "seen": {
            "hasHandle": True,
            "process": None,
            "launcherPid": None,
            "commandPid": None,
            "receipt": "absent",
            "ending": None,
        },
        "outputBytes": 12,
        "nextStep": advise(State.STARTED, None).next_step,
    }
    code, out, err = box.run("show", "offer-1")
    assert (code, err) == (0, "")
    assert "lease     version 4, until 1970-01-01T00:00:30Z by the control plane's clock\n" in out
    assert "process   its handle cannot be read\n" in out
    assert "output    12 bytes\n" in out


def test_the_process_of_a_record_is_seen_running_and_then_exited(box: Box, living: subprocess.Popen[bytes]) -> None:
    box.put("offer-1", State.RUNNING_ACKNOWLEDGED, handle=box.handle(living.pid))
    seen = box.facts("offer-1")["seen"]
    assert (seen["hasHandle"], seen["process"], seen["commandPid"]) == (True, "running", living.pid)
    assert f"process   running (launcher {living.pid}, command {living.pid})\n" in box.run("show", "offer-1")[1]

    living.kill()
    living.wait()
    assert box.facts("offer-1")["seen"]["process"] == "exited"


def test_a_receipt_is_genuine_only_with_its_capability(box: Box) -> None:
    box.put("offer-1", State.STARTED)
    assert box.facts("offer-1")["seen"]["receipt"] == "absent"
    assert not (box.state / "receipts").exists()

    path = box.receipt()
    seen = box.facts("offer-1")["seen"]
    assert (seen["receipt"], seen["ending"]) == ("genuine", "exited")

    path.write_text(path.read_text().replace(b64u(CAPABILITY), b64u(bytes(32))))
    seen = box.facts("offer-1")["seen"]
    assert (seen["receipt"], seen["ending"]) == ("not_genuine", None)

    path.write_text("{")
    assert box.facts("offer-1")["seen"]["receipt"] == "unusable"


def test_an_offer_that_is_not_there_is_an_error(box: Box) -> None:
    box.put("offer-1")
    for action in ("show", "quarantine"):
        code, out, err = box.run(action, "offer-2")
        assert (code, out) == (1, "")
        assert "holds no such record: qlworker journal list" in err


@pytest.mark.parametrize("name", ["..", "../session.json", "/etc/passwd", "", "a\x00b"])
def test_a_name_that_leads_elsewhere_is_wrong_usage(box: Box, name: str) -> None:
    box.put("offer-1")
    for action in ("show", "quarantine"):
        assert box.run(action, name)[0] == 2
    assert box.opens_with() == ["offer-1"]


def test_a_name_of_two_records_is_not_guessed(box: Box) -> None:
    box.put("x")
    box.put("x.json")

    code, _, err = box.run("show", "x.json")
    assert code == 2
    assert err == "qlworker: x.json means two records: call the one x.json.json, the other x\n"
    assert box.facts("x")["offerId"] == "x"
    assert box.facts("x.json.json")["offerId"] == "x.json"


# What is never printed


@pytest.mark.req("R402")
def test_no_token_digest_command_or_variable_is_ever_printed(box: Box, living: subprocess.Popen[bytes]) -> None:
    revision = make_revision(
        ShellCommand(command="curl https://hidden.example/script"),
        [
            Binding(name="HIDDEN_NAME", kind="public", value="hidden-value"),
            Binding(
                name="HIDDEN_SECRET",
                kind="secret",
                secret_ref="qlsecret:v1:" + b64u(b'{"projectId":"project-1","name":"hidden"}'),
            ),
        ],
    )
    handle = box.handle(living.pid)
    record = box.put("offer-1", State.RUNNING_ACKNOWLEDGED, handle=handle, revision=revision)
    box.receipt()
    box.put("offer-2", revision=revision)
    box.file("offer-2.json").write_bytes(box.file("offer-2.json").read_bytes()[:-40])
    stored = box.file("offer-1.json").read_text()
    hidden = [
        TOKEN,
        lease_token_digest(TOKEN),
        b64u(CAPABILITY),
        callback_token_digest(CAPABILITY),
        record.offer.execution_digest,
        handle,
        "hidden",
        "HIDDEN",
        "curl",
        "qlsecret",
    ]
    for secret in hidden:
        assert secret in stored or secret == b64u(CAPABILITY)

    printed = [
        box.run("list"),
        box.run("list", "--json"),
        box.run("show", "offer-1"),
        box.run("show", "offer-1", "--json"),
        box.run("show", "offer-2"),
        box.run("quarantine", "offer-1", "--yes"),
        box.run("quarantine", "offer-1", "--yes", "--force"),
        box.run("quarantine", "offer-2", "--yes"),
    ]
    assert [code for code, _, _ in printed] == [0, 0, 0, 0, 3, 3, 0, 0]
    for code, out, err in printed:
        for secret in hidden:
            assert secret not in out + err, code
    entry_text = repr(JournalSnapshot(box.journal).claim())
    assert TOKEN not in entry_text


# quarantine


@pytest.mark.req("R30")
def test_one_record_is_moved_whole_and_the_journal_opens_without_it(box: Box) -> None:
    box.put("offer-1", State.RECOVERY_REQUIRED)
    box.put("offer-2", State.STARTED)
    before = box.file("offer-1.json").read_bytes()

    code, out, err = box.run("quarantine", "offer-1", "--yes")

    assert (code, err) == (0, "")
    assert "the outcome of this execution will not be reported" in out
    assert f"moved to {box.journal}/quarantine/offer-1.json" in out
    assert box.quarantined() == {"offer-1.json": before}
    assert (box.journal / "quarantine").stat().st_mode & 0o777 == 0o700
    assert box.opens_with() == ["offer-2"]
    assert [path.name for path in (box.journal / "offers").iterdir()] == ["offer-2.json"]
    assert not (box.journal / ".owner.lock").exists()


def test_what_is_in_quarantine_already_is_never_overwritten(box: Box) -> None:
    for run in ("run-1", "run-2", "run-3"):
        box.put("offer-1", run_id=run)
        assert box.run("quarantine", "offer-1", "--yes")[0] == 0

    kept = box.quarantined()
    assert list(kept) == ["offer-1.json", "offer-1.json.1", "offer-1.json.2"]
    for run, data in zip(("run-1", "run-2", "run-3"), kept.values(), strict=True):
        assert f'"runId":"{run}"'.encode() in data


@pytest.mark.req("R29")
def test_while_a_worker_owns_the_journal_nothing_is_moved_and_its_pid_is_named(box: Box) -> None:
    box.put("offer-1", State.RECOVERY_REQUIRED)
    with box.owned_by_another() as worker:
        before = box.contents()
        code, out, err = box.run("quarantine", "offer-1", "--yes")
        assert (code, out) == (3, "")
        assert f"is owned by process {worker.pid} " in err
        assert box.contents() == before

        worker.kill()
        worker.wait()
        assert box.run("quarantine", "offer-1", "--yes")[0] == 0
    assert list(box.quarantined()) == ["offer-1.json"]


@pytest.mark.parametrize("state", sorted(SETTLED))
def test_a_settled_record_is_refused_because_retention_removes_it(box: Box, state: State) -> None:
    box.put("offer-1", state)
    before = box.contents()

    code, out, err = box.run("quarantine", "offer-1", "--yes", "--force")

    assert (code, out) == (1, "")
    assert err == f"qlworker: offer offer-1 is {state}: retention removes settled records by itself\n"
    assert box.contents() == before


def test_a_record_whose_command_runs_is_refused_unless_forced_and_the_command_goes_on(
    box: Box, living: subprocess.Popen[bytes]
) -> None:
    box.put("offer-1", State.STARTED, handle=box.handle(living.pid))
    before = box.contents()

    code, out, err = box.run("quarantine", "offer-1", "--yes")
    assert (code, out) == (3, "")
    assert f"the command of offer offer-1 runs (launcher {living.pid})" in err
    assert box.contents() == before

    code, out, err = box.run("quarantine", "offer-1", "--yes", "--force")
    assert (code, err) == (0, "")
    assert "its command runs and goes on unwatched" in out
    assert list(box.quarantined()) == ["offer-1.json"]
    assert living.poll() is None


@pytest.mark.parametrize(("answer", "code"), [("", 1), ("\n", 1), ("n\n", 1), ("yess\n", 1), ("y\n", 0), ("YES\n", 0)])
def test_without_yes_it_is_asked_first(box: Box, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    box.put("offer-1")
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))

    found, out, err = box.run("quarantine", "offer-1")

    assert found == code
    assert "the run becomes lost when its lease ends" in out
    assert ("nothing was moved" in err) is (code == 1)
    assert list(box.quarantined()) == ([] if code else ["offer-1.json"])
    assert box.opens_with() == (["offer-1"] if code else [])


def test_a_record_that_changed_while_a_person_thought_stays(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    record = box.put("offer-1")

    def think(_prompt: str) -> str:
        # nobody owns the journal now: a worker may start, work and end
        box.as_worker(lambda journal: journal.replace(advance(record, Event.STARTING_ACKED, 3000)))
        return "y"

    monkeypatch.setattr("builtins.input", think)
    code, _, err = box.run("quarantine", "offer-1")

    assert code == 1
    assert err == "qlworker: offer-1.json has changed meanwhile: look at it again\n"
    assert box.quarantined() == {}
    assert box.facts("offer-1")["state"] == "starting_acknowledged"


def test_a_worker_that_starts_while_a_person_thinks_keeps_its_journal(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put("offer-1")
    holders: list[Any] = []

    def think(_prompt: str) -> str:
        holder = box.owned_by_another()
        holders.append(holder)
        holder.__enter__()
        return "y"

    monkeypatch.setattr("builtins.input", think)
    try:
        code, _, err = box.run("quarantine", "offer-1")
    finally:
        for holder in holders:
            holder.__exit__(None, None, None)

    assert code == 3
    assert "is owned by process" in err
    assert box.quarantined() == {}


def test_the_pending_claim_of_the_same_offer_goes_too_so_that_the_next_pull_cannot_bring_it_as_new(box: Box) -> None:
    box.put("offer-1", State.LAUNCHING)
    box.as_worker(lambda journal: journal.write_claim(make_claim("offer-1")))

    assert box.run("quarantine", "offer-1", "--yes")[0] == 0

    assert list(box.quarantined()) == ["offer-1.json", "pending-claim.json"]
    assert box.as_worker(lambda journal: journal.read_claim()) is None


def test_the_pending_claim_of_another_offer_stays(box: Box) -> None:
    box.put("offer-1", State.LAUNCHING)
    box.as_worker(lambda journal: journal.write_claim(make_claim("offer-2")))

    assert box.run("quarantine", "offer-1", "--yes")[0] == 0

    assert list(box.quarantined()) == ["offer-1.json"]
    assert box.as_worker(lambda journal: journal.read_claim()) == make_claim("offer-2")


def test_a_record_stays_while_a_damaged_claim_may_be_of_its_offer(box: Box) -> None:
    box.put("offer-1", State.LAUNCHING)
    (box.journal / "pending-claim.json").touch(0o600)

    code, _, err = box.run("quarantine", "offer-1", "--yes")
    assert code == 1
    assert "pending-claim.json cannot be read and may be of this offer" in err
    assert box.quarantined() == {}

    assert box.run("quarantine", "pending-claim.json", "--yes")[0] == 0
    assert box.run("quarantine", "offer-1", "--yes")[0] == 0


def test_the_move_is_durable_and_the_claim_goes_before_the_record(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put("offer-1")
    box.as_worker(lambda journal: journal.write_claim(make_claim("offer-1")))
    calls = record_calls(monkeypatch)

    assert box.run("quarantine", "offer-1", "--yes")[0] == 0

    there = f"{box.journal}/quarantine"
    first = calls.index(("rename", f"{box.journal}/pending-claim.json -> {there}/pending-claim.json"))
    assert calls[first : first + 6] == [
        ("rename", f"{box.journal}/pending-claim.json -> {there}/pending-claim.json"),
        ("fsync", there),
        ("fsync", str(box.journal)),
        ("rename", f"{box.journal}/offers/offer-1.json -> {there}/offer-1.json"),
        ("fsync", there),
        ("fsync", f"{box.journal}/offers"),
    ]


async def test_nothing_is_set_aside_by_one_who_does_not_own_the_journal(box: Box) -> None:
    ownership = box.ownership()
    await ownership.acquire()
    journal = FileJournal(box.journal, ownership=ownership, file_limiter=trio.CapacityLimiter(1))
    await journal.open()
    await journal.create(accept(make_offer(), 1000))
    entry = JournalSnapshot(box.journal).find("offer-1")
    await ownership.release()

    with pytest.raises(OwnershipLost):
        Quarantine(box.journal, ownership).set_aside(entry)

    assert box.file("offer-1.json").exists()
    assert not (box.journal / "quarantine").exists()


async def test_a_settled_record_is_not_set_aside_whoever_asks(box: Box) -> None:
    ownership = box.ownership()
    await ownership.acquire()
    journal = FileJournal(box.journal, ownership=ownership, file_limiter=trio.CapacityLimiter(1))
    await journal.open()
    record = make_record()
    await journal.create(record)
    for event, members in steps_to(State.START_FAILURE_ACKNOWLEDGED):
        record = advance(record, event, 2000, **members)
        await journal.replace(record)

    with pytest.raises(Conflict, match="retention"):
        Quarantine(box.journal, ownership).set_aside(JournalSnapshot(box.journal).find("offer-1"))

    assert box.file("offer-1.json").exists()
    await ownership.release()


def test_an_action_is_needed(box: Box) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["journal"])
    assert ended.value.code == 2
