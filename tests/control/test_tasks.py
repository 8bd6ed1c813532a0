"""Task files and their publication: append-only, idempotent, and refused before anything is stored."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from qlworker.control.clock import SettableClock
from qlworker.control.credentials import issue
from qlworker.control.database import Database
from qlworker.control.schema import task_execution_revisions
from qlworker.control.secret_store import SecretStore
from qlworker.control.secret_writer import put_secret
from qlworker.control.task_file import TaskDefinition, parse_task
from qlworker.control.task_secrets import require_secrets
from qlworker.control.tasks import publish, task, tasks
from qlworker.domain.errors import Conflict, Misconfigured
from qlworker.domain.revision import ArgvCommand, SecretReference, ShellCommand

EXAMPLE = Path(__file__).parents[2] / "docs/task.example.toml"
MINIMAL = 'project = "home"\nid = "job"\n[command]\nshell = "true"\n'


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/control.sqlite", SettableClock(1_790_000_000_000))
    database.create_tables()
    yield database
    database.close()


def parsed(text: str) -> TaskDefinition:
    return parse_task(text.encode(), "job.toml")


def stored(database: Database) -> list[object]:
    with database.transaction() as tx:
        return list(tx.rows(select(task_execution_revisions)))


def test_the_example_file_is_a_task_that_can_be_published(database: Database) -> None:
    definition = parse_task(EXAMPLE.read_bytes(), EXAMPLE.name)
    with database.transaction() as tx:
        publish(tx, definition)
        execution = task(tx, "home", "backup").execution

    assert isinstance(execution.command, ShellCommand)
    assert [(each.name, each.kind) for each in execution.environment] == [
        ("EXCLUDE", "public"),
        ("PASSWORD", "secret"),
        ("SOURCE", "public"),
    ]
    assert execution.timeout_ms == 3_600_000
    assert execution.working_directory == "/tmp"


def test_every_commented_key_of_the_example_is_a_key() -> None:
    """What the manual offers must not be refused as unknown once the comment sign is gone."""
    text = EXAMPLE.read_text()
    keys = ("# revision", "# arch", "# runtimes", "# labels", "# features", "# min_", "# gpu", "# protocol", "# [[", "# weight")
    keys += ("# worker", "# [retry", "# max_attempts", "# safety", "# backoff")
    keys += ("# name", "# cron", "# timezone", "# misfire", "# if_running")
    lines = [line.removeprefix("# ") if line.startswith(keys) else line for line in text.splitlines()]

    definition = parsed("\n".join(lines))

    assert definition.revision == 3
    assert definition.worker == "router-1"
    assert definition.retry is not None
    assert definition.placement is not None
    assert definition.placement.preferred is not None
    assert [each.name for each in definition.triggers] == ["nightly"]


def test_a_program_keeps_its_empty_arguments(database: Database) -> None:
    text = 'project = "home"\nid = "job"\n[command]\nprogram = "/bin/echo"\narguments = ["", "b"]\n'
    with database.transaction() as tx:
        publish(tx, parsed(text))
        command = task(tx, "home", "job").execution.command

    assert command == ArgvCommand(file="/bin/echo", args=["", "b"])


def test_secrets_stand_in_a_revision_as_references_of_its_project(database: Database) -> None:
    text = MINIMAL + '[environment.secret]\nTOKEN = "api"\n[environment]\nbundle = "common@7"\n'
    with database.transaction() as tx:
        publish(tx, parsed(text))
        execution = task(tx, "home", "job").execution

    reference, bundle = execution.secret_refs()[0], execution.environment_bundle_ref
    assert SecretReference.parse(reference) == SecretReference(project_id="home", name="api")
    assert isinstance(bundle, str)
    assert SecretReference.parse(bundle) == SecretReference(project_id="home", name="common", version=7)


def test_publishing_the_same_content_again_is_the_same_revision(database: Database) -> None:
    with database.transaction() as tx:
        first = publish(tx, parsed(MINIMAL))
    before = stored(database)
    with database.transaction() as tx:
        again = publish(tx, parsed(MINIMAL))

    assert (first.created, again.created) == (True, False)
    assert first.revision == again.revision == 1
    assert stored(database) == before


def test_other_content_is_the_next_revision_and_the_old_one_stays(database: Database) -> None:
    with database.transaction() as tx:
        publish(tx, parsed(MINIMAL))
    before = stored(database)
    with database.transaction() as tx:
        second = publish(tx, parsed(MINIMAL.replace("true", "false")))
        old = task(tx, "home", "job", 1).execution.command

    assert second.revision == 2
    assert set(before) < set(stored(database))
    assert old == ShellCommand(command="true")


def test_going_back_to_older_content_is_a_new_revision(database: Database) -> None:
    with database.transaction() as tx:
        numbers = [publish(tx, parsed(text)).revision for text in (MINIMAL, MINIMAL.replace("true", "false"), MINIMAL)]

    assert numbers == [1, 2, 3]


def test_a_pinned_number_is_idempotent_for_the_same_content_and_a_conflict_for_other(database: Database) -> None:
    pinned = "revision = 4\n" + MINIMAL
    with database.transaction() as tx:
        assert publish(tx, parsed(pinned)).created
    before = stored(database)

    with database.transaction() as tx:
        assert not publish(tx, parsed(pinned)).created
    with pytest.raises(Conflict, match="other content"), database.transaction() as tx:
        publish(tx, parsed(pinned.replace("true", "false")))
    with pytest.raises(Conflict, match="newest, which is 4"), database.transaction() as tx:
        publish(tx, parsed(pinned.replace("= 4", "= 2")))

    assert stored(database) == before


def test_the_digest_does_not_depend_on_when_it_was_published(database: Database, tmp_path: Path) -> None:
    other = Database(f"sqlite:///{tmp_path}/other.sqlite", SettableClock(5))
    other.create_tables()
    with database.transaction() as tx, other.transaction() as late:
        digests = {publish(tx, parsed(MINIMAL)).content_digest, publish(late, parsed(MINIMAL)).content_digest}
    other.close()

    assert len(digests) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("project = ", ["not TOML"]),
        ('project = "home"\n', ["id"]),
        (MINIMAL + "color = 1", ["color"]),
        ("color = 1\n" + MINIMAL, ["color"]),
        ("timeout_s = 0\n" + MINIMAL, ["timeout_s is 0", "0.001 to 31536000 seconds"]),
        ("timeout_s = nan\n" + MINIMAL, ["timeout_s", "0.001"]),
        ('working_directory = "tmp"\n' + MINIMAL, ["workingDirectory", "absolute"]),
        ("revision = 0\n" + MINIMAL, ["revision", "1 to"]),
        (MINIMAL + 'program = "/bin/true"', ["exactly one of shell and program"]),
        ('project = "home"\nid = "job"\n[command]\n', ["exactly one of shell and program"]),
        (MINIMAL + 'arguments = ["x"]', ["takes no arguments"]),
        (MINIMAL + 'interpreter = "/bin/zsh"', ["/bin/sh or /bin/bash"]),
        ('project = "home"\nid = "job"\n[command]\nprogram = "true"', ["command.file", "absolute"]),
        (MINIMAL + '[environment.public]\nQL3_X = "1"', ["QL3_"]),
        (MINIMAL + '[environment.public]\nA = "1"\n[environment.secret]\nA = "s"', ["unique"]),
        (MINIMAL + '[environment.secret]\nA = "../s"', ["secret's name"]),
        (MINIMAL + '[environment]\nbundle = "common"', ["name@version"]),
        (MINIMAL + '[environment]\nbundle = "common@0"', ["version"]),
        ('project = "a/b"\nid = "j"\n[command]\nshell = "true"\n[environment.secret]\nA = "s"', ["project", "secrets"]),
        (MINIMAL + "[[placement.preferred]]\nlabels = { a = 'b' }\nweight = 101", ["weight", "1 to 100"]),
        (MINIMAL + f"[placement]\nfeatures = {[str(n) for n in range(17)]}", ["16"]),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_rule(text: str, words: list[str]) -> None:
    with pytest.raises(Misconfigured) as caught:
        parsed(text)

    for word in ["job.toml", *words]:
        assert word in str(caught.value)


def test_an_error_never_shows_a_value_that_may_be_a_secret() -> None:
    text = MINIMAL + '[environment.secret]\nTOKEN = "hunter2 hunter2"\n'

    with pytest.raises(Misconfigured) as caught:
        parsed(text)

    assert "hunter2" not in str(caught.value)


def test_a_revision_above_the_plan_limit_is_refused_and_nothing_is_stored(database: Database) -> None:
    text = MINIMAL.replace("true", "x" * 60_000) + f'[environment.public]\nA = "{"y" * 50_000}"\n'

    with pytest.raises(ValueError, match="98304"), database.transaction() as tx:
        publish(tx, parsed(text))

    assert stored(database) == []


def test_a_task_that_was_never_published_is_named(database: Database) -> None:
    with database.transaction() as tx:
        publish(tx, parsed(MINIMAL))

    with pytest.raises(Conflict, match="no task home/other"), database.transaction() as tx:
        task(tx, "home", "other")
    with pytest.raises(Conflict, match="no revision 9 of task home/job"), database.transaction() as tx:
        task(tx, "home", "job", 9)


def test_the_list_shows_each_task_once_with_its_newest_revision(database: Database) -> None:
    with database.transaction() as tx:
        for text in (MINIMAL, MINIMAL.replace("true", "false"), MINIMAL.replace('"job"', '"a"')):
            publish(tx, parsed(text))

    with database.transaction() as tx:
        assert [(each.id, each.revision) for each in tasks(tx, 10)] == [("a", 1), ("job", 2)]
        assert [each.id for each in tasks(tx, 1)] == ["a"]


def test_a_definition_survives_the_way_through_json() -> None:
    definition = parse_task(EXAMPLE.read_bytes(), EXAMPLE.name)

    assert msgspec.json.decode(msgspec.json.encode(definition), type=TaskDefinition) == definition


RETRY = '[retry]\nmax_attempts = 3\nsafety = "idempotent"\n'


@pytest.mark.req("R328", "R331", "R371")
@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("[retry]\nmax_attempts = 2\n", "retry.safety is unknown"),
        ('[retry]\nsafety = "surely"\n', "Invalid enum value"),
        ('[retry]\nsafety = "idempotent"\nmax_attempts = 17\n', "it must be 1 to 16"),
        ('[retry]\nsafety = "idempotent"\nbackoff_s = 90000\n', "0 to 86400 seconds"),
        ('[retry]\nsafety = "idempotent"\nbackoff_s = 9\nbackoff_max_s = 8\n', "not above the second"),
        ('[retry]\nsafety = "idempotent"\ntries = 3\n', "tries"),
    ],
)
def test_a_retry_that_nobody_vouches_for_is_refused(table: str, reason: str) -> None:
    with pytest.raises(Misconfigured, match=reason):
        parsed(MINIMAL + table)


def test_what_a_revision_fixes_beside_its_execution_makes_another_revision(database: Database) -> None:
    with database.transaction() as tx:
        first = publish(tx, parsed(MINIMAL))
        second = publish(tx, parsed(MINIMAL + RETRY))
        again = publish(tx, parsed(MINIMAL + RETRY))
        assert (first.revision, second.revision, again.created) == (1, 2, False)
        assert task(tx, "home", "job", 1).retry is None
        retry = task(tx, "home", "job").retry
        assert retry is not None
        assert (retry.max_attempts, retry.safety) == (3, "idempotent")


def test_a_task_for_a_worker_that_nobody_added_is_refused_and_nothing_is_stored(database: Database) -> None:
    definition = parsed('worker = "router-1"\n' + MINIMAL)
    with database.transaction() as tx, pytest.raises(Conflict, match="router-1, which nobody added; add it with qlcontrol"):
        publish(tx, definition)
    assert stored(database) == []
    with database.transaction() as tx:
        issue(tx, b"p" * 32, "router-1", 1000)
    with database.transaction() as tx:
        publish(tx, definition)
        assert task(tx, "home", "job").worker == "router-1"


def test_a_secret_that_is_not_stored_is_named(tmp_path: Path) -> None:
    definition = parsed(MINIMAL + '[environment.secret]\nTOKEN = "api"\n[environment]\nbundle = "common@7"\n')
    store = SecretStore(tmp_path)
    with pytest.raises(Conflict, match=r"needs the secret api, .* qlcontrol secret put api --project home"):
        require_secrets(store, definition)
    put_secret(tmp_path, "home", "api", None, b"x")
    with pytest.raises(Conflict, match="qlcontrol secret put common --project home --version 7"):
        require_secrets(store, definition)
    put_secret(tmp_path, "home", "common", 7, b"x")
    require_secrets(store, definition)
