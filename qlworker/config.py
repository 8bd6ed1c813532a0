"""The configuration: one TOML file, every key with its default and bounds here and nowhere else.

A file is read once, whole, at start. Nothing else is configuration: the environment is not read. Bounds come from
wire-protocol.md §12 and control-plane.md §19; what differs from them says why.
"""

import typing
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from .config_key import REQUIRED, Key, check_origin, check_search_path, choice, features, flag, integer, labels, path, text
from .domain.backoff import CAP_MS, full_jitter_ms
from .domain.claim import MAX_ATTEMPTS
from .domain.errors import Misconfigured
from .domain.text import check_credential_id, check_worker_id

DEFAULT_FILE: Final = "/etc/qlworker/qlworker.toml"
FILE_BYTES: Final = 256 * 1024

_MIB: Final = 1024 * 1024
_DAY_S: Final = 24 * 3600
_MOST_RUNS: Final = {"edge": 4, "node": 64}

Profile = Literal["edge", "node"]


class WorkerSettings(msgspec.Struct, frozen=True):
    """[worker]: who this worker is and how much it takes."""

    id: Annotated[
        str,
        text(
            check_worker_id,
            "Name of this worker, as enrolled at the control plane.",
            allowed="1 to 128 of [A-Za-z0-9._:-], starting with a letter or digit",
        ),
    ]
    profile: Annotated[
        Profile, choice("edge", "node", meaning="Picks the defaults below: `edge` for a small box, `node` for a server.")
    ]
    max_concurrent_runs: Annotated[
        int, integer(1, 64, "", "Commands that may run at the same time.", edge=1, node=8, upper="4 (edge) or 64 (node)")
    ]
    labels: Annotated[dict[str, str], labels("What tasks may ask for by label.")]
    features: Annotated[list[str], features("What tasks may ask for by feature name.")]


class ControlPlaneSettings(msgspec.Struct, frozen=True):
    """[control_plane]: where the control plane is and how it talks."""

    origin: Annotated[
        str,
        text(
            check_origin,
            "Address of the control plane's worker ingress.",
            allowed="https://host or https://host:port without user, path, query or fragment, at most 2048 characters",
        ),
    ]
    request_timeout_s: Annotated[
        int, integer(1, 60, "seconds", "Longest silence on a connection before a request is given up.", edge=15)
    ]
    capabilities_dialect: Annotated[
        Literal["auto", "baseline", "later"],
        choice("auto", "baseline", "later", meaning="Form of the capabilities document; `auto` tries and remembers."),
    ]
    secrets_dialect: Annotated[
        Literal["auto", "v1", "v2"],
        choice("auto", "v1", "v2", meaning="Form of the secret delivery; `auto` tries and remembers."),
    ]
    live_output: Annotated[
        bool,
        flag(
            "Send output while a command runs, to a control plane that takes it. The artifact is sent at the end anyway.",
            default=True,
        ),
    ]


class CredentialSettings(msgspec.Struct, frozen=True):
    """[credentials]: files read again for every connection, so that replacing them rotates them."""

    certificate: Annotated[Path, path("Client certificate chain, PEM.")]
    key: Annotated[Path, path("Its private key, PEM, mode 0600.", hidden=True)]
    trust_anchors: Annotated[Path, path("Certificates of the only authorities trusted, PEM.")]
    token: Annotated[Path, path("File with the worker's token, mode 0600. Never the token itself.", hidden=True)]
    expected_credential_id: Annotated[
        str | None,
        text(
            check_credential_id,
            "Refuse a token of any other credential.",
            allowed="1 to 64 of [A-Za-z0-9.:-], starting with a letter or digit",
            default=None,
            hidden=True,
        ),
    ]


class StateSettings(msgspec.Struct, frozen=True):
    """[state]: what must survive. There is no default directory: on OpenWrt /var is lost at every reboot."""

    directory: Annotated[Path, path("Private directory on storage that survives a reboot: holds `journal/` and `receipts/`.")]
    output_directory: Annotated[
        Path | None,
        path(
            "Where output is kept until it is uploaded; may be memory. Unset: `output/` in the state directory.", default=None
        ),
    ]
    journal_capacity: Annotated[
        int, integer(1, 1024, "records", "Offers the journal holds; nothing is evicted.", edge=64, node=256)
    ]
    ownership_window_s: Annotated[
        int,
        integer(
            5, 300, "seconds", "After this an owner of the journal that cannot be proven alive or dead is replaced.", edge=30
        ),
    ]

    @property
    def journal(self) -> Path:
        """Where offers, claim and session are stored."""
        return self.directory / "journal"

    @property
    def receipts(self) -> Path:
        """Where launchers publish completion receipts."""
        return self.directory / "receipts"

    @property
    def output(self) -> Path:
        """Where output files are kept until they are uploaded."""
        return self.output_directory or self.directory / "output"


class SessionSettings(msgspec.Struct, frozen=True):
    """[session]: rhythm of the talk with the control plane. The lease's default is above the upstream's 45 s, so that a slow
    router comes back within its session after a restart and its running commands keep their leases (wire-protocol §13.3)."""

    lease_s: Annotated[int, integer(15, 600, "seconds", "How long the session outlives the last heartbeat.", edge=120)]
    heartbeat_s: Annotated[
        int, integer(5, 300, "seconds", "Time between heartbeats; twice it must fit into the lease.", edge=30)
    ]
    cadence_ms: Annotated[
        int,
        integer(
            100,
            60_000,
            "milliseconds",
            "Time between looks at everything; twice it must fit into the lease.",
            edge=2000,
            node=500,
        ),
    ]
    pull_backoff_ms: Annotated[
        int, integer(100, CAP_MS, "milliseconds", "First wait after a failed pull or step; it doubles up to 60 s.", edge=1000)
    ]
    drain_timeout_s: Annotated[
        int, integer(1, 600, "seconds", "How long a drain waits for running commands.", edge=60, node=300)
    ]


class OutputSettings(msgspec.Struct, frozen=True):
    """[output]: what a command may write. The maximum is that of the upload (wire-protocol §0.4)."""

    maximum_bytes: Annotated[
        int,
        integer(
            65_536,
            64 * _MIB,
            "bytes",
            "Output kept of one command; more is cut with a visible gap.",
            edge=4 * _MIB,
            node=64 * _MIB,
        ),
    ]
    minimum_free_bytes: Annotated[
        int,
        integer(
            _MIB,
            1024 * 1024 * _MIB,
            "bytes",
            "Free space below which no command is started: room for the receipts of those that run.",
            edge=32 * _MIB,
            node=256 * _MIB,
        ),
    ]


class ExecutionSettings(msgspec.Struct, frozen=True):
    """[execution]: how commands are run and forgotten.

    The grace's default is above the upstream's 1 s, because a script on a slow box needs longer to clean up; 30 s is the
    upstream's bound. The default directory is `/`: it always exists, and unlike in /tmp no other user can put a module or
    a script there that a command picks up.
    """

    stop_grace_ms: Annotated[int, integer(1, 30_000, "milliseconds", "Time between TERM and KILL.", edge=10_000)]
    search_path: Annotated[
        str,
        text(
            check_search_path,
            "Where runtimes and interpreters are looked for. No command gets it: its environment is what its task says.",
            allowed="absolute directories with colons between them, at most 4096 characters",
            default="/usr/sbin:/usr/bin:/sbin:/bin",
        ),
    ]
    default_directory: Annotated[Path, path("Working directory of a command whose task sets none.", default="/", root=True)]
    retention_s: Annotated[
        int,
        integer(
            60,
            30 * _DAY_S,
            "seconds",
            "Age after which a settled record and its output are removed; covers all tries of a pull.",
            edge=3600,
        ),
    ]


class LogSettings(msgspec.Struct, frozen=True):
    """[log]: events on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        choice("debug", "info", "warning", "error", default="info", meaning="Least important events shown."),
    ]
    format: Annotated[
        Literal["auto", "json", "human"],
        choice("auto", "json", "human", meaning="`auto`: human on a terminal, JSON lines otherwise."),
    ]


class Settings(msgspec.Struct, frozen=True):
    """The whole configuration. `file` is where it came from, for messages."""

    file: Path
    worker: WorkerSettings
    control_plane: ControlPlaneSettings
    credentials: CredentialSettings
    state: StateSettings
    session: SessionSettings
    output: OutputSettings
    execution: ExecutionSettings
    log: LogSettings


SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "worker": WorkerSettings,
    "control_plane": ControlPlaneSettings,
    "credentials": CredentialSettings,
    "state": StateSettings,
    "session": SessionSettings,
    "output": OutputSettings,
    "execution": ExecutionSettings,
    "log": LogSettings,
}
"""Every section, in the order of the manual."""


def keys(section: str) -> dict[str, Key]:
    """The keys of `section` in the order of the manual."""
    hints = typing.get_type_hints(SECTIONS[section], include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def load(file: Path) -> Settings:
    """The settings in `file`. Raises Misconfigured with one line: file, key, value and what is allowed."""
    document = _read(file)
    _refuse_unknown(file, "", document, SECTIONS, "section")
    for name, table in document.items():
        if not isinstance(table, dict):
            raise Misconfigured(f"{file}: {name}: must be a section, [{name}]")
    profile = document.get("worker", {}).get("profile", "edge")
    settings = Settings(file, **{name: _section(file, name, document.get(name, {}), profile) for name in SECTIONS})
    _check_together(settings)
    return settings


def _read(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"cannot read {file}: {error.strerror}: name the configuration with --config") from error
    if len(data) > FILE_BYTES:
        raise Misconfigured(f"{file}: must be at most {FILE_BYTES} bytes")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Misconfigured(f"{file}: must be UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(f"{file}: not TOML: {error}") from error


def _refuse_unknown(file: Path, prefix: str, given: dict[str, Any], known: typing.Iterable[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise Misconfigured(f"{file}: {prefix}{name}: unknown {what}; known are {', '.join(known)}")


def _section(file: Path, section: str, given: dict[str, Any], profile: str) -> Any:
    definitions = keys(section)
    _refuse_unknown(file, f"{section}.", given, definitions, "key")
    values: dict[str, Any] = {}
    for name, key in definitions.items():
        value = given.get(name, key.default(profile))
        if value is REQUIRED:
            raise Misconfigured(f"{file}: {section}.{name} is missing: set it to {key.allowed.replace('`', '')}")
        if value is None:
            values[name] = None
            continue
        try:
            values[name] = key.check(value)
        except ValueError as error:
            raise Misconfigured(f"{file}: {section}.{name} = {_shown(key, value)}: {error}") from error
    return SECTIONS[section](**values)


def _shown(key: Key, value: Any) -> str:
    """The value as TOML would have it, shortened; nothing of one that may be a secret in the wrong place."""
    shown = repr(value) if not isinstance(value, str | bool) else msgspec.json.encode(value).decode("utf-8", "replace")
    if key.hidden or any(sign in shown for sign in ("ql3w_", "-----BEGIN", "@")):
        return "(not shown)"
    return shown if len(shown) <= 80 else shown[:79] + "…"


def _check_together(settings: Settings) -> None:
    """The rules that tie keys together."""
    worker, state, session = settings.worker, settings.state, settings.session

    def require(holds: bool, key: str, value: object, rule: str) -> None:
        if not holds:
            raise Misconfigured(f"{settings.file}: {key} = {value}: must be {rule}")

    most = _MOST_RUNS[worker.profile]
    runs = worker.max_concurrent_runs
    require(runs <= most, "worker.max_concurrent_runs", runs, f'1 to {most} with profile = "{worker.profile}"')
    require(
        state.journal_capacity >= runs,
        "state.journal_capacity",
        state.journal_capacity,
        f"at least worker.max_concurrent_runs, which is {runs}",
    )
    half = session.lease_s // 2
    require(
        session.heartbeat_s <= half,
        "session.heartbeat_s",
        session.heartbeat_s,
        f"at most {half} seconds: twice the heartbeat must fit into session.lease_s = {session.lease_s}",
    )
    require(
        session.cadence_ms <= session.lease_s * 500,
        "session.cadence_ms",
        session.cadence_ms,
        f"at most {session.lease_s * 500} milliseconds: twice the cadence must fit into session.lease_s = {session.lease_s}",
    )
    window = redelivery_window_s(settings)
    require(
        settings.execution.retention_s >= window,
        "execution.retention_s",
        settings.execution.retention_s,
        f"at least {window} seconds: the time that all tries of one pull may take",
    )
    for private in (state.journal, state.receipts):
        require(
            not _nested(state.output, private),
            "state.output_directory",
            f'"{state.output}"',
            f"apart from {private}: neither inside nor above it",
        )


def redelivery_window_s(settings: Settings) -> int:
    """Seconds that one pull may take with all its tries: each wait at its longest, each request at its time-out (R269)."""
    waits = sum(full_jitter_ms(attempt, settings.session.pull_backoff_ms, 1.0) for attempt in range(1, MAX_ATTEMPTS))
    return -(-waits // 1000) + MAX_ATTEMPTS * settings.control_plane.request_timeout_s


def _nested(left: Path, right: Path) -> bool:
    return left == right or left in right.parents or right in left.parents
