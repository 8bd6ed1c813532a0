"""qlcontrol.toml: defaults, bounds, and errors that name file, key, value and what is allowed."""

from pathlib import Path

import pytest

from qlworker.control.config import Settings
from qlworker.control.config_file import CONFIG_VARIABLE, SYSTEM_CONFIG, default_config, load
from qlworker.domain.errors import Misconfigured


def written(directory: Path, text: str) -> Path:
    path = directory / "qlcontrol.toml"
    path.write_text(text)
    return path


def test_an_empty_file_gives_the_defaults_with_paths_beside_the_file(tmp_path: Path) -> None:
    settings = load(written(tmp_path, ""))

    assert settings.listen.port == 5801
    assert settings.database_url == f"sqlite:///{tmp_path}/qlcontrol.sqlite"
    assert settings.operator.socket == tmp_path / "run/operator.sock"
    assert settings.tls.client_ca == tmp_path / "ca/certificate.pem"
    assert settings.limits.request_timeout_s == 15


def test_the_default_run_lease_outlives_a_router_that_needs_20_seconds_to_start() -> None:
    """Half a lease may have gone by when the worker dies: what remains must still cover the restart."""
    assert Settings().run_lease_ms / 2 > 20_000


def test_absolute_paths_and_a_database_url_stay_as_written(tmp_path: Path) -> None:
    settings = load(written(tmp_path, '[storage]\ndatabase = "postgresql+psycopg://db/ql"\nsecrets = "/srv/secrets"\n'))

    assert settings.database_url == "postgresql+psycopg://db/ql"
    assert settings.storage.secrets == Path("/srv/secrets")


def test_the_session_range_is_told_in_milliseconds(tmp_path: Path) -> None:
    settings = load(written(tmp_path, "[sessions]\nlease_min_s = 7.5\nlease_max_s = 60\n"))

    assert (settings.session_lease_min_ms, settings.session_lease_max_ms) == (7_500, 60_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[listen]\nport = 70000", ["listen.port", "70000", "0 to 65535"]),
        ("[listen]\nport = '5801'", ["listen.port", "'5801'", "int"]),
        ("[listen]\nprot = 1", ["[listen]", "prot", "unknown"]),
        ("[lissten]\nport = 1", ["lissten", "unknown"]),
        ("listen = 5", ["listen", "5", "table"]),
        ("[runs]\nlease_s = 4", ["runs.lease_s", "4", "5 to 600 seconds"]),
        ("[runs]\nlease_s = nan", ["runs.lease_s", "nan", "5 to 600"]),
        ("[sessions]\nlease_min_s = 100\nlease_max_s = 50", ["sessions.lease_max_s", "50", "100 to 600"]),
        ("[limits]\nin_flight = 257", ["limits.in_flight", "257", "1 to 256"]),
        ("[limits]\nbody_bytes = 65537", ["limits.body_bytes", "65537", "1024 to 65536"]),
        ("[limits]\nrequest_timeout_s = 0.05", ["limits.request_timeout_s", "0.05", "0.1 to 120"]),
        ("[tls]\nhandshake_timeout_s = 61", ["tls.handshake_timeout_s", "61", "0.1 to 60"]),
        ("[tls]\nkey = ''", ["tls.key", "''", "not empty"]),
        ("[dialect]\nsecrets = 'v3'", ["dialect.secrets", "'v3'", '"v2" or "v1"']),
        ("[listen", ["not TOML"]),
        (f"[operator]\nsocket = '/{'s' * 120}'", ["operator.socket", "121", "107"]),
    ],
)
def test_an_error_names_file_key_value_and_what_is_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    path = written(tmp_path, text)

    with pytest.raises(Misconfigured) as caught:
        load(path)

    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_wrong_database_value_is_not_shown_because_it_may_hold_a_password(tmp_path: Path) -> None:
    path = written(tmp_path, "[storage]\ndatabase = ['postgresql://ql:hunter2@db/ql']")

    with pytest.raises(Misconfigured, match=r"storage\.database") as caught:
        load(path)

    assert "hunter2" not in str(caught.value)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"cannot read .*absent\.toml.*--config"):
        load(tmp_path / "absent.toml")


def test_the_environment_names_the_default_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "/srv/ql.toml")
    assert default_config() == Path("/srv/ql.toml")

    monkeypatch.delenv(CONFIG_VARIABLE)
    assert default_config() == SYSTEM_CONFIG
