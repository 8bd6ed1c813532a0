"""How long a worker with a full journal takes until it asks for work: `python bench/restart.py [RUNS]`.

64 records in every state there is, as a crash leaves them, against a real control plane over mutual TLS. A worker with an
empty journal is measured in the same run, so that the ratio holds on any machine.
"""

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from qlworker.adapters.process_table import read_boot_id  # noqa: E402
from qlworker.domain.canonical import log_artifact_id  # noqa: E402
from qlworker.domain.identity import DurableHandle  # noqa: E402
from qlworker.domain.record import InboxRecord, RecoveryReason, State  # noqa: E402
from tests.builders import DIGEST, make_record  # noqa: E402
from tests.system.world import Box, World  # noqa: E402

RECORDS = 64


def record(number: int) -> InboxRecord:
    """The `number`th record; the states take turns."""
    state = list(State)[number % len(State)]
    base = make_record(f"offer-{number:03}", run_id=f"run-{number}", attempt_id=f"attempt-{number}")
    members: dict[str, object] = {}
    if state not in (State.ACCEPTED, State.STARTING_ACKNOWLEDGED):
        members = {
            "executor_started_at_ms": 1000,
            "log_artifact_id": log_artifact_id("project-1", f"run-{number}", f"attempt-{number}", f"offer-{number:03}"),
            "completion_receipt_callback_sequence": 1,
            "completion_receipt_token_digest": DIGEST,
        }
    if state in (State.STARTED, State.RUNNING_ACKNOWLEDGED):
        gone = DurableHandle(v=1, h=f"handle-{number}", b=read_boot_id(), p=2**22 - 1, g=2**22 - 1, s="1")
        members["executor_handle"] = gone.text()
    if state is State.COMPLETION_ACKNOWLEDGED:
        members["completion_acknowledged_at_ms"] = 2000
    if state is State.RECOVERY_REQUIRED:
        members["recovery_reason"] = RecoveryReason.LAUNCH_OUTCOME_UNKNOWN
    return msgspec.structs.replace(base, state=state, revision=number, **members)


def fill(box: Box) -> None:
    """Writes the records as a worker's journal holds them."""
    offers = box.state / "journal/offers"
    for directory in (box.state, offers.parent, offers):
        directory.mkdir(mode=0o700)
    for number in range(RECORDS):
        one = record(number)
        path = offers / f"{one.offer_id}.json"
        path.write_bytes(one.to_json() + b"\n")
        path.chmod(0o600)


def measure(world: World, prepare: Callable[[Box], None]) -> float:
    """Seconds from starting the program to its first answered pull."""
    box = world.add_worker(f"[state]\njournal_capacity = {2 * RECORDS}\n")
    prepare(box)
    begun = time.monotonic()
    worker = box.start()
    worker.wait_event("pull_idle")
    seconds = time.monotonic() - begun
    worker.stop()
    return seconds


def main(runs: int) -> int:
    """Prints the medians and their ratio."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        world.start()
        try:
            full, empty = [], []
            for _ in range(runs):
                full.append(measure(world, fill))
                empty.append(measure(world, lambda box: None))
        finally:
            world.stop()
    print(f"Python {platform.python_version()}, {os.uname().machine}, {os.cpu_count()} cores, median of {runs}")
    print(f"{RECORDS} records in every state  {statistics.median(full):6.2f} s from exec to the first answered pull")
    print(f"empty journal                {statistics.median(empty):6.2f} s")
    print(f"ratio                        {statistics.median(full) / statistics.median(empty):6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
