"""The configuration: every bound, every refusal with its words, and the shipped example."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qlworker.cli.config_table import table
from qlworker.config import SECTIONS, Settings, keys, load, redelivery_window_s
from qlworker.config_key import REQUIRED
from qlworker.domain.errors import Misconfigured

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "docs" / "qlworker.example.toml"

MINIMAL = """
[worker]
id = "edge-1"
{worker}
[control_plane]
origin = "https://control.example.net"
{control_plane}
[credentials]
certificate = "/c/crt"
key = "/c/key"
trust_anchors = "/c/ca"
token = "/c/token"
{credentials}
[state]
directory = "/var/state"
{state}
[session]
{session}
[output]
{output}
[execution]
{execution}
[log]
{log}
"""


def write(tmp_path: Path, **sections: str) -> Path:
    file = tmp_path / "qlworker.toml"
    text = MINIMAL
    for line in [line for lines in sections.values() for line in lines.splitlines()]:
        name = line.partition(" = ")[0]
        text = re.sub(rf"^{name} = .*\n", "", text, flags=re.MULTILINE)
    file.write_text(text.format_map({name: sections.get(name, "") for name in SECTIONS}), "utf-8")
    return file


def settings(tmp_path: Path, **sections: str) -> Settings:
    return load(write(tmp_path, **sections))


def refusal(tmp_path: Path, **sections: str) -> str:
    file = write(tmp_path, **sections)
    with pytest.raises(Misconfigured) as caught:
        load(file)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"{file}: ")


def test_a_minimal_file_gets_the_defaults_of_a_small_box(tmp_path: Path) -> None:
    found = settings(tmp_path)

    assert found.worker.max_concurrent_runs == 1
    assert found.session.lease_s == 120
    assert found.session.cadence_ms == 2000
    assert found.state.journal_capacity == 64
    assert found.state.journal == Path("/var/state/journal")
    assert found.state.receipts == Path("/var/state/receipts")
    assert found.state.output == Path("/var/state/output")
    assert found.output.maximum_bytes == 4 * 1024 * 1024
    assert found.control_plane.origin == "https://control.example.net"


def test_the_profile_picks_the_defaults_and_a_given_value_wins(tmp_path: Path) -> None:
    found = settings(tmp_path, worker='profile = "node"', session="cadence_ms = 700")

    assert found.worker.max_concurrent_runs == 8
    assert found.state.journal_capacity == 256
    assert found.session.cadence_ms == 700
    assert found.session.drain_timeout_s == 300


def test_an_error_names_file_key_value_and_range_in_one_line(tmp_path: Path) -> None:
    file = write(tmp_path, session="lease_s = 3")

    with pytest.raises(Misconfigured) as caught:
        load(file)

    assert str(caught.value) == f"{file}: session.lease_s = 3: must be 15 to 600 seconds"


def integers() -> list[tuple[str, str, int, int]]:
    found = []
    for section in SECTIONS:
        for name, key in keys(section).items():
            bounds = re.match(r"(\d+) to (\d+)", key.allowed)
            if bounds and isinstance(key.edge, int):
                found.append((section, name, int(bounds[1]), int(bounds[2])))
    return found


BOUNDS = {
    "worker.max_concurrent_runs": (1, 4),
    "control_plane.request_timeout_s": (1, 60),
    "state.journal_capacity": (1, 1024),
    "state.ownership_window_s": (5, 300),
    "session.lease_s": (15, 600),
    "session.heartbeat_s": (5, 300),
    "session.cadence_ms": (100, 60_000),
    "session.pull_backoff_ms": (100, 60_000),
    "session.drain_timeout_s": (1, 600),
    "output.maximum_bytes": (64 * 1024, 64 * 1024**2),
    "output.minimum_free_bytes": (1024**2, 1024**4),
    "execution.stop_grace_ms": (1, 30_000),
    "execution.retention_s": (60, 30 * 24 * 3600),
}


def test_every_number_is_listed_with_the_bounds_of_the_limits_table() -> None:
    assert {f"{section}.{name}": (low, high) for section, name, low, high in integers()} == BOUNDS


# what else must be so for the extreme to be allowed by the rules that tie keys together
COMPANIONS: dict[str, dict[str, str]] = {
    "session.lease_s:15": {"session": "heartbeat_s = 5"},
    "session.heartbeat_s:300": {"session": "lease_s = 600"},
    "session.cadence_ms:60000": {},
    "session.pull_backoff_ms:60000": {},
}


@pytest.mark.parametrize("key", BOUNDS)
@pytest.mark.req("R36", "R78", "R267", "R268")
def test_one_beyond_each_bound_is_refused_and_the_bound_itself_is_not(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    low, high = BOUNDS[key]

    for value in (low - 1, high + 1, -1, low + 0.5, "true", f'"{low}"', "1979-05-27"):
        text = refusal(tmp_path, **{section: f"{name} = {value}"})
        assert text.startswith(f"{key} = ")
        assert f"must be {low} to {high}" in text or "with profile" in text

    for value in (low, high):
        if key == "execution.retention_s" and value == low:
            continue  # the time that a pull may take is longer: see below
        companions = COMPANIONS.get(f"{key}:{value}", {})
        lines = companions.get(section, "")
        found = settings(tmp_path, **{**companions, section: f"{name} = {value}\n{lines}"})
        assert getattr(getattr(found, section), name) == value


@pytest.mark.parametrize("window", ["4.999", "300.001", "4", "301"])
@pytest.mark.req("R78")
def test_the_stale_window_is_5_seconds_to_5_minutes(tmp_path: Path, window: str) -> None:
    text = refusal(tmp_path, state=f"ownership_window_s = {window}")

    assert text == f"state.ownership_window_s = {window}: must be 5 to 300 seconds"


@pytest.mark.parametrize("change", ["", "pull_backoff_ms = 60000", "pull_backoff_ms = 100"])
@pytest.mark.req("R269")
def test_records_are_kept_for_as_long_as_one_pull_may_be_tried(tmp_path: Path, change: str) -> None:
    window = redelivery_window_s(settings(tmp_path, session=change))

    text = refusal(tmp_path, session=change, execution=f"retention_s = {window - 1}")
    assert text.startswith(f"execution.retention_s = {window - 1}: must be at least {window} seconds")
    assert settings(tmp_path, session=change, execution=f"retention_s = {window}").execution.retention_s == window


def test_the_window_of_one_pull_is_all_waits_and_all_time_outs(tmp_path: Path) -> None:
    # 1 + 2 + 4 + 8 + 16 + 32 + 9 times 60 seconds between sixteen requests of at most 15 seconds each
    assert redelivery_window_s(settings(tmp_path)) == 63 + 540 + 16 * 15


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"session": "lease_s = 60\nheartbeat_s = 31"}, "session.heartbeat_s = 31: must be at most 30 seconds"),
        ({"session": "lease_s = 15\nheartbeat_s = 7\ncadence_ms = 7501"}, "session.cadence_ms = 7501: must be at most 7500"),
        ({"worker": "max_concurrent_runs = 5"}, 'worker.max_concurrent_runs = 5: must be 1 to 4 with profile = "edge"'),
        (
            {"worker": 'profile = "node"\nmax_concurrent_runs = 64', "state": "journal_capacity = 63"},
            "state.journal_capacity = 63: must be at least worker.max_concurrent_runs, which is 64",
        ),
        ({"state": 'output_directory = "/var/state/journal"'}, "apart from /var/state/journal"),
        ({"state": 'output_directory = "/var/state/journal/out"'}, "apart from /var/state/journal"),
        ({"state": 'output_directory = "/var/state"'}, "apart from /var/state/journal"),
        ({"state": 'output_directory = "/var/state/receipts"'}, "apart from /var/state/receipts"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(tmp_path: Path, sections: dict[str, str], expected: str) -> None:
    assert expected in refusal(tmp_path, **sections)


@pytest.mark.parametrize("value", ["relative", "/", "//x", "/x/", "/x/../y", "/x/./y", "", "/x//y", "/x\\u0000y"])
def test_the_state_directory_is_absolute_normalised_and_not_the_root(tmp_path: Path, value: str) -> None:
    assert "must be an absolute path" in refusal(tmp_path, state=f'directory = "{value}"')


def test_commands_may_start_in_the_root_directory(tmp_path: Path) -> None:
    assert settings(tmp_path, execution='default_directory = "/"').execution.default_directory == Path("/")


@pytest.mark.parametrize(
    "origin",
    [
        "http://control.example.net",
        "control.example.net",
        "https://",
        "https://control.example.net/path",
        "https://control.example.net/?",
        "https://control.example.net?query",
        "https://control.example.net#fragment",
        "https://control.example.net:0",
        "https://control.example.net:65536",
        "https://control.example.net:port",
        "https://control example.net",
        "https://\uff43ontrol.example.net",
        "https://" + "a" * 2048,
    ],
)
def test_an_origin_is_https_and_nothing_but_host_and_port(tmp_path: Path, origin: str) -> None:
    assert refusal(tmp_path, control_plane=f'origin = "{origin}"').startswith("control_plane.origin = ")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("https://Control.Example.net/", "https://control.example.net"),
        ("https://127.0.0.1:5801", "https://127.0.0.1:5801"),
        ("https://[::1]:5801/", "https://[::1]:5801"),
    ],
)
def test_an_origin_is_kept_in_one_form(tmp_path: Path, origin: str, expected: str) -> None:
    assert settings(tmp_path, control_plane=f'origin = "{origin}"').control_plane.origin == expected


@pytest.mark.parametrize(
    ("sections", "secret"),
    [
        ({"credentials": 'token = "ql3w_c1_SECRETSECRETSECRET"'}, "SECRET"),
        ({"credentials": 'token = "SECRETSECRETSECRET"'}, "SECRET"),
        ({"credentials": 'key = """-----BEGIN PRIVATE KEY-----\nSECRET"""'}, "SECRET"),
        ({"credentials": 'expected_credential_id = "ql3w_c1_SECRETSECRETSECRET"'}, "SECRET"),
        ({"control_plane": 'origin = "https://user:SECRET@control.example.net"'}, "SECRET"),
        ({"worker": 'id = "ql3w_c1_SECRETSECRETSECRET "'}, "SECRET"),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path, sections: dict[str, str], secret: str) -> None:
    text = refusal(tmp_path, **sections)

    assert secret not in text
    assert "(not shown)" in text


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"worker": "labels = { '-x' = 'y' }"}, "a label's key must be"),
        ({"worker": "labels = { x = '' }"}, "a label's value must be 1 to 256 characters"),
        ({"worker": "labels = { x = 1 }"}, "must be a table of texts"),
        ({"worker": "features = ['A']"}, "a feature must be"),
        ({"worker": "features = ['a', 'a']"}, "without repeats"),
        ({"worker": "features = 'a'"}, "must be a list of names"),
        ({"worker": 'profile = "huge"'}, 'must be one of "edge", "node"'),
        ({"worker": "profile = []"}, 'must be one of "edge", "node"'),
        ({"worker": 'id = "über"'}, "must be 1 to 128 of"),
        ({"control_plane": "live_output = 1"}, "must be true or false"),
        ({"execution": 'search_path = "/bin:."'}, "must be absolute directories"),
        ({"execution": 'search_path = "/bin:"'}, "must be absolute directories"),
        ({"log": 'level = "loud"'}, "must be one of"),
    ],
)
def test_wrong_values_are_refused_with_the_rule(tmp_path: Path, sections: dict[str, str], expected: str) -> None:
    assert expected in refusal(tmp_path, **sections)


def test_too_many_labels_are_refused(tmp_path: Path) -> None:
    labels = ", ".join(f"k{number} = 'v'" for number in range(33))

    assert "labels must be at most 32" in refusal(tmp_path, worker=f"labels = {{ {labels} }}")


def test_a_long_value_is_shortened_in_the_error(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, log=f'level = "{"x" * 5000}"')) < 250


def test_an_unknown_key_is_refused_and_the_known_ones_are_named(tmp_path: Path) -> None:
    text = refusal(tmp_path, session="leese_s = 30")

    assert text.startswith("session.leese_s: unknown key; known are lease_s, ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sesion]\nlease_s = 30\n", "sesion: unknown section; known are worker, "),
        ("worker = 1\n", "worker: must be a section, [worker]"),
        ("[worker]\n", "worker.id is missing: set it to 1 to 128 of"),
        ("[worker\n", "not TOML: "),
        ("[worker]\nid = 'a'\nid = 'b'\n", "not TOML: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)

    with pytest.raises(Misconfigured) as caught:
        load(file)

    assert str(caught.value).startswith(f"{file}: {expected}")


@pytest.mark.parametrize("content", [b"\xff", b"# " + b"x" * 300_000])
def test_bytes_that_are_no_text_and_too_many_of_them_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content)

    with pytest.raises(Misconfigured, match="must be"):
        load(file)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(Misconfigured, match=r"cannot read .*: name the configuration with --config"):
        load(tmp_path / name)


def test_the_shipped_example_is_a_valid_configuration() -> None:
    assert load(EXAMPLE).worker.id == "router-1"


def test_the_shipped_example_shows_every_key_with_its_default() -> None:
    shown: dict[str, Any] = {}
    lines = []
    for line in EXAMPLE.read_text("utf-8").splitlines():
        lines.append(re.sub(r"^# (?=[a-z_]+ = )", "", line))
    shown = tomllib.loads("\n".join(lines))

    assert list(shown) == list(SECTIONS)
    for section in SECTIONS:
        definitions = keys(section)
        assert list(shown[section]) == list(definitions)
        for name, key in definitions.items():
            if key.edge is not REQUIRED and key.edge is not None:
                assert shown[section][name] == key.edge, f"{section}.{name}"


def test_the_example_with_every_line_active_loads(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# (?=[a-z_]+ = )", "", EXAMPLE.read_text("utf-8"), flags=re.MULTILINE), "utf-8")

    assert load(file).state.output == Path("/tmp/qlworker")


def test_the_table_of_the_readme_is_the_table_of_the_program() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    marked = re.search(r"<!-- config-table -->\n+(.*?)\n+<!-- /config-table -->", readme, re.DOTALL)
    if marked is None:
        pytest.skip("README.md has no table yet")

    assert marked[1] == table()


def test_every_key_is_documented() -> None:
    for section in SECTIONS:
        for name, key in keys(section).items():
            assert f"| `{section}.{name}` |" in table()
            assert key.meaning.endswith(".")
