"""What is known of a recorded owner of the journal: the table of decisions."""

import pytest

from qlworker.domain.errors import Misconfigured
from qlworker.domain.identity import Place, ProcessId
from qlworker.domain.ownership import OwnerRecord, Standing, check_window, standing

HERE = Place(host_id="host", boot_id="boot", pid_namespace=1, time_namespace=2)
OWNER = ProcessId(pid=77, start_ticks="123")


def judged(place: Place | None, *, alive: bool) -> Standing:
    owner = None if place is None else OwnerRecord.of(place, OWNER, "0" * 32)
    return standing(owner, HERE, lambda process: alive and process == OWNER)


@pytest.mark.req("R29", "R76")
@pytest.mark.parametrize(
    ("place", "alive", "expected"),
    [
        (HERE, True, Standing.ALIVE),
        (HERE, False, Standing.DEAD),
        (Place("host", "other boot", 1, 2), False, Standing.DEAD),
        (Place("host", "other boot", 9, 9), True, Standing.DEAD),
        (Place("other host", "boot", 1, 2), False, Standing.UNPROVABLE),
        (Place("other host", "other boot", 1, 2), False, Standing.UNPROVABLE),
        (Place("host", "boot", 9, 2), False, Standing.UNPROVABLE),
        (Place("host", "boot", 1, 9), False, Standing.UNPROVABLE),
        (None, False, Standing.UNPROVABLE),
    ],
)
def test_only_a_provably_dead_owner_is_dead(place: Place | None, alive: bool, expected: Standing) -> None:
    assert judged(place, alive=alive) is expected


def test_a_record_survives_its_file() -> None:
    record = OwnerRecord.of(HERE, OWNER, "0" * 32)
    assert OwnerRecord.parse(record.to_json() + b"\n") == record
    assert (record.place, record.process) == (HERE, OWNER)


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00" * 100, b"[1]", b'{"pid":1}', b"\xff\xfe"])
def test_damaged_bytes_are_no_record(data: bytes) -> None:
    assert OwnerRecord.parse(data) is None


@pytest.mark.req("R78")
@pytest.mark.parametrize("window_ms", [4_999, 300_001, 0, -1])
def test_a_window_out_of_bounds_is_refused(window_ms: int) -> None:
    with pytest.raises(Misconfigured, match="5000 to 300000"):
        check_window(window_ms)


@pytest.mark.req("R78")
@pytest.mark.parametrize("window_ms", [5_000, 300_000])
def test_the_bounds_of_the_window_are_allowed(window_ms: int) -> None:
    assert check_window(window_ms) == window_ms
