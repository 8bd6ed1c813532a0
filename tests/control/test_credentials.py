"""Worker credentials: told once, stored as digests, append-only, and never more than the header proves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from qlworker.control import credentials, deliveries
from qlworker.control.clock import SettableClock
from qlworker.control.credentials import authenticate, issue, listed, revoke
from qlworker.control.database import Database, Transaction
from qlworker.control.schema import security_audit, worker_credentials
from qlworker.domain.canonical import b64u
from qlworker.domain.errors import Conflict

PEPPER = b"p" * 32
HOUR = 3_600_000
NOW = 1_790_000_000_000


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOW)


@pytest.fixture
def database(tmp_path: Path, clock: SettableClock) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/control.sqlite", clock)
    database.create_tables()
    yield database
    database.close()


def new_token(tx: Transaction, worker_id: str = "edge-1", lifetime_ms: int = HOUR) -> str:
    token = issue(tx, PEPPER, worker_id, lifetime_ms).token
    assert token is not None
    return token


def rotate(tx: Transaction, worker_id: str, lifetime_ms: int, overlap_ms: int) -> str:
    """A rotated token, handed over."""
    issued = credentials.rotate(tx, PEPPER, worker_id, lifetime_ms)
    assert issued.token is not None
    deliveries.commit(tx, worker_id, issued.credential.credential_id, overlap_ms)
    deliveries.publish(tx, issued.credential.credential_id)
    return issued.token


def header(token: str) -> str:
    return f"Worker {token}"


def test_an_issued_token_proves_its_worker(database: Database) -> None:
    with database.transaction() as tx:
        issued = issue(tx, PEPPER, "edge-1", HOUR)
        assert issued.token is not None
        principal = authenticate(tx, PEPPER, header(issued.token))

    assert principal is not None
    assert (principal.worker_id, principal.credential_id, principal.version) == (
        "edge-1",
        issued.credential.credential_id,
        1,
    )


def test_neither_token_nor_secret_is_stored_or_shown(database: Database, tmp_path: Path) -> None:
    with database.transaction() as tx:
        issued = issue(tx, PEPPER, "edge-1", HOUR)
    assert issued.token is not None

    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    secret = issued.token.split("_", 2)[2]
    assert secret.encode() not in stored
    assert secret not in repr(issued)


def test_every_header_that_is_not_right_proves_nobody(database: Database) -> None:
    with database.transaction() as tx:
        token = new_token(tx)
    prefix, credential_id, _ = token.split("_", 2)
    wrong_secret = f"{prefix}_{credential_id}_{b64u(b'x' * 32)}"
    headers = [
        None,
        "",
        token,
        f"Bearer {token}",
        f"worker {token}",
        header(wrong_secret),
        header(token + "A"),
        header(token[:-1]),
        header(f"ql3w_unknown_{b64u(b'x' * 32)}"),
        header(f"ql3w__{b64u(b'x' * 32)}"),
        header(f"ql3w_{credential_id}_{b64u(b'x' * 31)}"),
        header(f"ql3w_{credential_id}_" + "é" * 43),
        header("ql3w_" + "a" * 400),
        header(token) + " ",
    ]

    with database.transaction() as tx:
        assert [None] * len(headers) == [authenticate(tx, PEPPER, each) for each in headers]


def test_another_pepper_proves_nobody(database: Database) -> None:
    with database.transaction() as tx:
        token = new_token(tx)
        assert authenticate(tx, b"q" * 32, header(token)) is None


def test_a_token_is_valid_from_its_start_up_to_but_not_at_its_expiry(database: Database, clock: SettableClock) -> None:
    with database.transaction() as tx:
        token = new_token(tx)

    for moment, valid in ((NOW - 1, False), (NOW, True), (NOW + HOUR - 1, True), (NOW + HOUR, False)):
        clock.advance(moment - clock.now_ms())
        with database.transaction() as tx:
            assert (authenticate(tx, PEPPER, header(token)) is not None) is valid


def test_a_rotation_lets_both_tokens_work_for_the_overlap_only(database: Database, clock: SettableClock) -> None:
    with database.transaction() as tx:
        old = new_token(tx)
        new = rotate(tx, "edge-1", HOUR, 60_000)

    with database.transaction() as tx:
        assert authenticate(tx, PEPPER, header(old)) is not None
        assert authenticate(tx, PEPPER, header(new)) is not None

    clock.advance(60_000)
    with database.transaction() as tx:
        assert authenticate(tx, PEPPER, header(old)) is None
        assert authenticate(tx, PEPPER, header(new)) is not None


def test_a_rotation_never_lengthens_the_old_credential(database: Database, clock: SettableClock) -> None:
    with database.transaction() as tx:
        old = new_token(tx, lifetime_ms=1_000)
        rotate(tx, "edge-1", HOUR, HOUR)

    clock.advance(1_000)
    with database.transaction() as tx:
        assert authenticate(tx, PEPPER, header(old)) is None


def test_a_revocation_ends_every_credential_at_once_and_can_be_repeated(database: Database) -> None:
    with database.transaction() as tx:
        tokens = [new_token(tx), rotate(tx, "edge-1", HOUR, HOUR)]
        other = new_token(tx, "edge-2")

    with database.transaction() as tx:
        assert revoke(tx, "edge-1") == 2
        assert revoke(tx, "edge-1") == 0
        assert [authenticate(tx, PEPPER, header(each)) for each in tokens] == [None, None]
        assert authenticate(tx, PEPPER, header(other)) is not None


def test_versions_are_only_ever_appended(database: Database) -> None:
    with database.transaction() as tx:
        issue(tx, PEPPER, "edge-1", HOUR)
        before = tx.rows(select(worker_credentials))
    with database.transaction() as tx:
        rotate(tx, "edge-1", HOUR, HOUR)
        revoke(tx, "edge-1")
        after = tx.rows(select(worker_credentials))

    assert set(before) <= set(after)
    assert {"revoked"} == {each.state for each in database_view(database)}


def database_view(database: Database) -> list[object]:
    with database.transaction() as tx:
        return list(listed(tx))


def test_a_second_credential_needs_a_rotation_and_a_rotation_needs_a_first(database: Database) -> None:
    with database.transaction() as tx:
        issue(tx, PEPPER, "edge-1", HOUR)

    with pytest.raises(Conflict, match="rotate or revoke"), database.transaction() as tx:
        issue(tx, PEPPER, "edge-1", HOUR)
    with pytest.raises(Conflict, match="add it first"), database.transaction() as tx:
        rotate(tx, "edge-2", HOUR, 0)


def test_a_revoked_worker_can_be_added_again(database: Database) -> None:
    with database.transaction() as tx:
        issue(tx, PEPPER, "edge-1", HOUR)
        revoke(tx, "edge-1")
        token = new_token(tx)
        assert authenticate(tx, PEPPER, header(token)) is not None


def test_every_change_leaves_an_audit_record(database: Database) -> None:
    with database.transaction() as tx:
        issue(tx, PEPPER, "edge-1", HOUR)
        rotate(tx, "edge-1", HOUR, 0)
        revoke(tx, "edge-1")
        operations = [row.operation_id for row in tx.rows(select(security_audit))]

    assert sorted(operations) == [
        "worker_credential_issue",
        "worker_credential_publish",
        "worker_credential_revoke",
        "worker_credential_revoke",
        "worker_credential_rotate",
        "worker_credential_shorten",
    ]


@pytest.mark.parametrize(("worker_id", "lifetime"), [("", HOUR), ("-a", HOUR), ("a" * 129, HOUR), ("edge-1", 0)])
def test_a_bad_request_changes_nothing(database: Database, worker_id: str, lifetime: int) -> None:
    with pytest.raises(ValueError), database.transaction() as tx:
        issue(tx, PEPPER, worker_id, lifetime)

    assert database_view(database) == []
