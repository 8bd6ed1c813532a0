"""`qlcontrol` as its user sees it: real commands against a real server, exit codes, and files that are right."""

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlworker.config import load as load_worker_settings
from qlworker.control.cli import main
from qlworker.control.config_file import load
from qlworker.control.credentials import authenticate
from qlworker.control.database import Database
from qlworker.control.operator_api import StoredSecret
from qlworker.domain.errors import QlworkerError
from tests.control.running import PROGRAM, ControlPlane, command

TASK = 'project = "home"\nid = "{name}"\n[command]\nshell = "exit 0"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("cli") / "control") as running:
        yield running


def put_task(server: ControlPlane, directory: Path, name: str) -> str:
    """Publishes a task of its own for a test, so that tests do not meet."""
    file = directory / f"{name}.toml"
    file.write_text(TASK.format(name=name))
    server.out("task", "put", str(file))
    return f"home/{name}"


def everything(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in directory.rglob("*")
    }


def test_init_makes_a_private_installation_that_serve_can_use(tmp_path: Path) -> None:
    done = command("init", "--data", str(tmp_path / "new/control"), "--name", "ql.lan", "--listen", "[::1]:0")

    assert done.returncode == 0, done.stderr
    made = tmp_path / "new/control"
    assert [path for path in [made, *made.rglob("*")] if path.stat().st_mode & 0o077] == []
    settings = load(made / "qlcontrol.toml")
    assert (settings.listen.name, settings.listen.host, settings.listen.port) == ("ql.lan", "::1", 0)
    assert settings.tls.key.is_file()
    assert len(settings.storage.pepper.read_bytes()) == 32
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["control"]


def test_two_installations_share_no_secret(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert command("init", "--data", str(tmp_path / name), "--name", "localhost").returncode == 0

    for file in ("pepper", "ca/key.pem", "tls/key.pem"):
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "b" / file).read_bytes()


def test_init_never_overwrites_anything(tmp_path: Path) -> None:
    arguments = ["init", "--data", str(tmp_path / "control"), "--name", "localhost"]
    assert command(*arguments).returncode == 0
    before = everything(tmp_path)

    again = command(*arguments)

    assert again.returncode == 3
    assert b"not an empty directory" in again.stderr
    assert everything(tmp_path) == before


@pytest.mark.parametrize("blocked", ["file", "link", "full"])
def test_init_refuses_a_place_that_is_taken(tmp_path: Path, blocked: str) -> None:
    place = tmp_path / "control"
    if blocked == "file":
        place.write_text("mine")
    elif blocked == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        (place / "mine").write_text("mine")
    before = everything(tmp_path)

    assert main(["init", "--data", str(place), "--name", "localhost"]) == 3
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--name", "local host"],
        ["--name", ""],
        ["--name", "localhost", "--data", "/tmp/" + "d" * 120],
    ],
)
def test_init_says_what_it_cannot_use_and_makes_nothing(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--data", str(tmp_path / "control"), *arguments]) == 2

    assert "cannot" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["absent"],
        ["init", "--data", "x"],
        ["init", "--data", "x", "--name", "n", "--listen", "5801"],
        ["init", "--data", "x", "--name", "n", "--listen", "h:65536"],
        ["run", "start", "job"],
        ["worker", "add", "edge-1", "--out", "x", "--days", "0"],
        ["secret", "put", "name"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_command_without_a_server_exits_4_and_says_so(tmp_path: Path) -> None:
    stopped = ControlPlane(tmp_path / "control")

    for arguments in (["worker", "list"], ["run", "list"], ["worker", "add", "edge-1", "--out", str(tmp_path / "kit")]):
        done = stopped.run(*arguments)
        assert done.returncode == 4
        assert b"is qlcontrol serve running?" in done.stderr
    assert not (tmp_path / "kit").exists()


def test_a_missing_configuration_exits_2(tmp_path: Path) -> None:
    done = command("worker", "list", "--config", str(tmp_path / "absent.toml"))

    assert done.returncode == 2
    assert b"absent.toml" in done.stderr


def test_a_kit_is_private_complete_and_accepted_by_the_worker(server: ControlPlane, tmp_path: Path) -> None:
    server.out("worker", "add", "kit-1", "--out", str(tmp_path / "kit"))

    kit = tmp_path / "kit"
    assert stat.S_IMODE(kit.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in kit.iterdir()}
    assert files == dict.fromkeys(("identity.pem", "ca.pem", "token", "qlworker.toml"), 0o600)
    settings = load_worker_settings(kit / "qlworker.toml")
    assert settings.worker.id == "kit-1"
    assert settings.control_plane.origin == server.ready["origin"]
    assert settings.credentials.token == kit / "token"
    assert settings.state.directory == kit / "state"


def test_a_kit_for_another_place_names_that_place(server: ControlPlane, tmp_path: Path) -> None:
    server.out(
        "worker", "add", "kit-2", "--out", str(tmp_path / "kit"), "--installed", "/etc/qlworker", "--state", "/mnt/state"
    )

    text = (tmp_path / "kit/qlworker.toml").read_text()
    assert 'token = "/etc/qlworker/token"' in text
    assert 'directory = "/mnt/state"' in text
    assert str(tmp_path) not in text


def test_a_kit_is_never_overwritten_and_then_no_token_is_issued(server: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()

    done = server.run("worker", "add", "kit-3", "--out", str(tmp_path / "kit"))

    assert done.returncode == 3
    assert "kit-3" not in server.out("worker", "list")


@pytest.mark.parametrize("worker_id", ["-x", "a b", "w" * 65])
def test_a_worker_id_that_cannot_be_certified_changes_nothing(server: ControlPlane, tmp_path: Path, worker_id: str) -> None:
    done = server.run("worker", "add", "--out", str(tmp_path / "kit"), "--", worker_id)

    assert done.returncode == 2
    assert not (tmp_path / "kit").exists()
    assert worker_id not in server.out("worker", "list", "--json")


def test_no_command_shows_a_token(server: ControlPlane, tmp_path: Path) -> None:
    said = server.out("worker", "add", "quiet-1", "--out", str(tmp_path / "kit"))
    first = (tmp_path / "kit/token").read_text().strip()
    said += server.out("worker", "rotate", "quiet-1", "--out", str(tmp_path / "kit"))
    second = (tmp_path / "kit/token").read_text().strip()
    said += server.out("worker", "list") + server.out("worker", "list", "--json")
    said += server.out("worker", "revoke", "quiet-1")

    assert first != second
    for token in (first, second):
        assert token.split("_", 2)[2] not in said


def test_a_rotated_kit_holds_the_new_token_and_both_work_until_the_revocation(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "control") as server:
        server.out("worker", "add", "edge-1", "--out", str(tmp_path / "kit"))
        tokens = [(tmp_path / "kit/token").read_text().strip()]
        server.out("worker", "rotate", "edge-1", "--out", str(tmp_path / "kit"), "--overlap", "600")
        tokens.append((tmp_path / "kit/token").read_text().strip())
        assert stat.S_IMODE((tmp_path / "kit/token").stat().st_mode) == 0o600
    assert valid(server, tokens) == [True, True]

    with server:
        assert "revoked 2 tokens, 1 certificate, 0 invitations" in server.out("worker", "revoke", "edge-1")
    assert valid(server, tokens) == [False, False]


def valid(server: ControlPlane, tokens: list[str]) -> list[bool]:
    """Which tokens the stopped server's database would accept."""
    database = Database(load(server.config).database_url)
    pepper = (server.directory / "pepper").read_bytes()
    try:
        with database.transaction() as tx:
            return [authenticate(tx, pepper, f"Worker {each}") is not None for each in tokens]
    finally:
        database.close()


def test_a_second_add_exits_1_and_names_the_remedy(server: ControlPlane, tmp_path: Path) -> None:
    server.out("worker", "add", "twice", "--out", str(tmp_path / "first"))

    done = server.run("worker", "add", "twice", "--out", str(tmp_path / "second"))

    assert done.returncode == 1
    assert b"rotate or revoke" in done.stderr
    assert not (tmp_path / "second").exists()


def test_a_task_is_put_listed_and_shown(server: ControlPlane, tmp_path: Path) -> None:
    name = put_task(server, tmp_path, "shown")

    assert "revision 1  unchanged" in server.out("task", "put", str(tmp_path / "shown.toml"))
    assert name in server.out("task", "list")
    assert "exit 0" in server.out("task", "show", name)
    shown = json.loads(server.out("task", "show", name, "--json"))
    assert shown["published"]["revision"] == 1
    assert name.split("/")[1] in {each["id"] for each in json.loads(server.out("task", "list", "--json"))}


def test_a_bad_task_file_exits_2_and_names_it(server: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('project = "home"\nid = "bad"\n[command]\n')

    for file in ("bad.toml", "absent.toml"):
        done = server.run("task", "put", str(tmp_path / file))
        assert done.returncode == 2
        assert file in done.stderr.decode()
    assert "home/bad" not in server.out("task", "list")


def test_a_secret_comes_from_standard_input_and_is_never_shown(server: ControlPlane) -> None:
    said = server.out("secret", "put", "api", "--project", "home", stdin=b"hunter2")

    assert (server.directory / "secrets/home/api").read_bytes() == b"hunter2"
    assert "hunter2" not in said + server.log.read_text()


def test_a_secret_that_is_too_long_exits_2_and_keeps_the_old_one(server: ControlPlane) -> None:
    server.out("secret", "put", "long", "--project", "home", stdin=b"old")

    done = server.run("secret", "put", "long", "--project", "home", stdin=b"x" * 200_000)

    assert done.returncode == 2
    assert b"16384 bytes" in done.stderr
    assert (server.directory / "secrets/home/long").read_bytes() == b"old"


def test_a_run_is_started_listed_shown_cancelled_and_remembered(server: ControlPlane, tmp_path: Path) -> None:
    task = put_task(server, tmp_path, "runs")
    run_id = server.out("run", "start", task, "--priority", "2", "--key", "k1").strip()

    assert server.out("run", "start", task, "--key", "k1").strip() == run_id
    assert run_id in server.out("run", "list", "--task", "runs")
    assert "queued" in server.out("run", "show", run_id)
    assert "requested, now cancelled" in server.out("run", "cancel", run_id)
    shown = json.loads(server.out("run", "show", run_id, "--json"))
    assert (shown["run"]["status"], shown["run"]["priority"]) == ("cancelled", 2)
    assert [each["status"] for each in shown["attempts"]] == ["cancelled"]
    events = json.loads(server.out("run", "events", run_id, "--json"))
    assert [each["sequence"] for each in events] == [1, 2, 3, 4, 5]
    assert "run.cancelled" in server.out("run", "events", run_id)
    assert server.out("run", "logs", run_id) == ""


def test_a_follower_of_a_run_that_gets_no_exit_code_exits_1(server: ControlPlane, tmp_path: Path) -> None:
    task = put_task(server, tmp_path, "followed")
    follower = subprocess.Popen(
        [*PROGRAM, "run", "start", task, "--follow", "--config", str(server.config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert follower.stderr is not None
    run_id = follower.stderr.readline().split()[1].decode()

    server.out("run", "cancel", run_id)
    stdout, stderr = follower.communicate(timeout=60)

    assert follower.returncode == 1
    assert stdout == b""
    assert b"cancelled" in stderr


def test_a_request_above_1_mib_is_refused(server: ControlPlane) -> None:
    with server.operator() as operator, pytest.raises(QlworkerError):
        operator.call(StoredSecret, "PUT", "/secrets", b"x" * 3_000_000, project="home", name="huge")

    assert not (server.directory / "secrets/home/huge").exists()


@pytest.mark.parametrize("verb", ["show", "cancel", "logs", "events"])
def test_an_unknown_run_exits_1_and_is_named(server: ControlPlane, verb: str) -> None:
    done = server.run("run", verb, "absent")

    assert done.returncode == 1
    assert b"there is no run absent" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(server: ControlPlane) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "worker", "list", "--json", "--config", str(server.config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(timeout=60)

    assert b"Traceback" not in stderr
