"""A receipt is a fact only with the capability of its attempt."""

import json

import msgspec
import pytest
from msgspec import UNSET

from qlworker.domain import receipt as receipt_module
from qlworker.domain.canonical import b64u, callback_token_digest
from qlworker.domain.receipt import CLOCK_TOLERANCE_MS, RECEIPT_BYTES, Ending, Receipt, authenticate
from qlworker.domain.record import Event, InboxRecord, State, advance
from tests.builders import make_record

TOKEN = bytes(range(32))


def launching() -> InboxRecord:
    record = advance(make_record(), Event.STARTING_ACKED, 2000)
    return advance(
        record,
        Event.BARRIER_RAISED,
        3000,
        executor_started_at_ms=3000,
        log_artifact_id="wlog-" + "0" * 30,
        completion_receipt_callback_sequence=1,
        completion_receipt_token_digest=callback_token_digest(TOKEN),
    )


def receipt(**changes: object) -> Receipt:
    members = {
        "schema_version": 2,
        "run_id": "run-1",
        "attempt_id": "attempt-1",
        "callback_sequence": 1,
        "token": b64u(TOKEN),
        "started_at_ms": 3000,
        "finished_at_ms": 4000,
        "exit_code": 0,
        "ending": Ending.EXITED,
        **changes,
    }
    return Receipt(**members)  # type: ignore[arg-type]


@pytest.mark.req("R180", "R181", "R182", "R188")
def test_the_attempts_own_receipt_is_genuine() -> None:
    assert authenticate(receipt(), launching(), 5000)
    assert authenticate(receipt(schema_version=1, ending=UNSET), launching(), 5000)


@pytest.mark.req("R180", "R181", "R182", "R184", "R188", "R396")
@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "run-2"},
        {"attempt_id": "attempt-2"},
        {"callback_sequence": 2},
        {"started_at_ms": 3001},
        {"started_at_ms": 2999},
        {"token": b64u(bytes(32))},
        {"token": b64u(TOKEN[:31])},
        {"token": b64u(TOKEN + b"x")},
        {"token": b64u(TOKEN) + "="},
        {"token": "not base64 at all!"},
        {"token": ""},
    ],
)
def test_anything_else_is_not(change: dict[str, object]) -> None:
    assert not authenticate(receipt(**change), launching(), 5000)


def test_an_end_more_than_five_minutes_ahead_is_not_believed_unless_the_time_is_not_known() -> None:
    now = 4000 - CLOCK_TOLERANCE_MS

    assert authenticate(receipt(), launching(), now)
    assert not authenticate(receipt(), launching(), now - 1)
    assert authenticate(receipt(), launching(), None)
    assert not authenticate(receipt(run_id="run-2"), launching(), None)


@pytest.mark.req("R187", "R190", "R191")
def test_a_record_without_sequence_and_digest_authenticates_nothing_and_stays_readable() -> None:
    record = advance(make_record(), Event.STARTING_ACKED, 2000)
    legacy = msgspec.structs.replace(
        launching(),
        state=State.RECOVERY_REQUIRED,
        recovery_reason="launch_outcome_unknown",
        completion_receipt_callback_sequence=UNSET,
        completion_receipt_token_digest=UNSET,
    )
    for each in (record, legacy):
        assert msgspec.json.decode(each.to_json(), type=InboxRecord).to_json() == each.to_json()
        assert not authenticate(receipt(), each, 5000)


@pytest.mark.req("R189")
def test_the_digests_are_compared_by_the_constant_time_primitive(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def spy(left: str, right: str) -> bool:
        compared.append((left, right))
        return False

    monkeypatch.setattr(receipt_module, "digests_equal", spy)

    assert not authenticate(receipt(), launching(), 5000)
    assert compared == [(callback_token_digest(TOKEN), callback_token_digest(TOKEN))]


@pytest.mark.parametrize(
    "change",
    [
        {"callback_sequence": 0},
        {"finished_at_ms": 2999},
        {"exit_code": 256},
        {"exit_code": -1},
        {"schema_version": 1},
        {"ending": UNSET},
        {"signal": 9},
        {"ending": Ending.SIGNALED},
        {"run_id": "a/b"},
        {"attempt_id": ""},
    ],
)
def test_a_receipt_of_another_form_is_none(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        receipt(**change)


def test_a_receipt_is_parsed_exactly() -> None:
    good = receipt(ending=Ending.SIGNALED, signal=9, exit_code=137)
    assert Receipt.parse(good.to_json()) == good

    extra = json.loads(good.to_json()) | {"more": 1}
    for bad in (b"", b"{}", b"[]", b"\xff", json.dumps(extra).encode(), good.to_json() + b" " * RECEIPT_BYTES):
        with pytest.raises(ValueError) as caught:
            Receipt.parse(bad)
        assert good.token not in str(caught.value)


def test_only_one_ending_says_that_nothing_ran() -> None:
    assert receipt(ending=Ending.NOT_STARTED).says_not_started
    assert not receipt().says_not_started
    assert not receipt(schema_version=1, ending=UNSET).says_not_started
