"""What qlcontrol.toml may say: frozen settings. Every default and every bound of the control plane is here.

Durations are seconds in the file and milliseconds behind the properties that end in `_ms`. A relative path is relative to
the directory of the file. Source: control-plane.md §19, wire-protocol.md §1.5.
"""

import os
import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

CONFIG_NAME: Final = "qlcontrol.toml"

# sockaddr_un holds 108 bytes with the closing NUL (unix(7)).
SOCKET_PATH_BYTES: Final = 107

_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z|[0-9A-Fa-f:.]{2,45}\Z")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_LOOPBACK: Final = re.compile(r"http://(127\.[0-9.]+|localhost|\[::1\])(:[0-9]+)?/?\Z")


ExpiryPolicy = Literal["lost", "evidence"]


def _within(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value:g}, it must be {low:g} to {high:g}{unit and ' '}{unit}")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; an unknown key is refused."""


class Listen(_Section, frozen=True, kw_only=True):
    """Where workers connect. Port 0 lets the kernel choose; the ready line tells which.

    `name` is how workers reach this host: it stands in their kits and must stand in the server's certificate.
    """

    name: str = "localhost"
    host: str = "0.0.0.0"  # noqa: S104 - routers come from outside; certificates keep strangers out
    port: int = 5801

    def __post_init__(self) -> None:
        for key, value in (("name", self.name), ("host", self.host)):
            if not _HOST.match(value):
                raise ValueError(f"listen.{key} is {value!r}, it must be a DNS name or an IP address")
        _within("listen.port", self.port, 0, 65_535)


class Tls(_Section, frozen=True, kw_only=True):
    """The server's own certificate and key, the authorities whose client certificates are accepted, and the list of those that
    are revoked, which `qlcontrol serve` keeps itself."""

    certificate: Path = Path("tls/certificate.pem")
    key: Path = Path("tls/key.pem")
    client_ca: Path = Path("ca/certificate.pem")
    revoked: Path = Path("tls/revoked.pem")
    handshake_timeout_s: float = 10

    def __post_init__(self) -> None:
        _within("tls.handshake_timeout_s", self.handshake_timeout_s, 0.1, 60, "seconds")


class Enrolment(_Section, frozen=True, kw_only=True):
    """The listener where boxes with an invitation become workers, on `listen.host`; without `port` there is none. Certificates
    signed there, and those that workers renew, last `certificate_days`."""

    port: int | None = None
    certificate_days: int = 90

    def __post_init__(self) -> None:
        if self.port is not None:
            _within("enrolment.port", self.port, 0, 65_535)
        _within("enrolment.certificate_days", self.certificate_days, 1, 3_650, "days")


class Authority(_Section, frozen=True, kw_only=True):
    """The private authority that certificates are signed with. Its key is read by `qlcontrol worker add` and by a process that
    lives as long as one signature, never by the one that talks to the network."""

    certificate: Path = Path("ca/certificate.pem")
    key: Path = Path("ca/key.pem")


class Storage(_Section, frozen=True, kw_only=True):
    """Everything that is kept. An empty `database` means SQLite in the file `qlcontrol.sqlite` of the data directory;
    `connections` are those to a PostgreSQL."""

    data: Path = Path()
    database: str = ""
    connections: int = 4
    pepper: Path = Path("pepper")
    secrets: Path = Path("secrets")
    artifacts: Path = Path("artifacts")
    live: Path = Path("live")

    def __post_init__(self) -> None:
        _within("storage.connections", self.connections, 1, 16)


class Bucket(_Section, frozen=True, kw_only=True):
    """An S3-compatible bucket. Without `endpoint` it is Amazon's. `credentials` names a private TOML file with access_key_id
    and secret_access_key; without it, boto3 looks where it always looks. Names of objects begin with `prefix`."""

    name: str
    endpoint: str = ""
    region: str = ""
    prefix: str = ""
    credentials: Path | None = None

    def __post_init__(self) -> None:
        if not _BUCKET.match(self.name):
            raise ValueError("artifacts.bucket.name must be 3 to 63 of [a-z0-9.-]")
        if self.endpoint and not self.endpoint.startswith(("https://", "http://")):
            raise ValueError("artifacts.bucket.endpoint must be a URL that begins with https://")
        if self.endpoint.startswith("http://") and not _LOOPBACK.match(self.endpoint):
            raise ValueError("artifacts.bucket.endpoint must begin with https://; only a server on this host may use http://")


class Artifacts(_Section, frozen=True, kw_only=True):
    """Where logs are kept, and for how long: in `storage.artifacts`, or in `bucket`, which replicas on several hosts need."""

    retention_s: float = 30 * 86_400
    bucket: Bucket | None = None

    def __post_init__(self) -> None:
        _within("artifacts.retention_s", self.retention_s, 60, 365 * 86_400, "seconds")


class Operator(_Section, frozen=True, kw_only=True):
    """The Unix socket of the `qlcontrol` commands. Whoever may open it may do everything."""

    socket: Path = Path("run/operator.sock")


class MetricsListener(_Section, frozen=True, kw_only=True):
    """Where Prometheus and load balancers ask, in the clear: on this host unless `host` says otherwise; without `port`
    nowhere."""

    host: str = "127.0.0.1"
    port: int | None = None

    def __post_init__(self) -> None:
        if not _HOST.match(self.host):
            raise ValueError(f"metrics.host is {self.host!r}, it must be a DNS name or an IP address")
        if self.port is not None:
            _within("metrics.port", self.port, 0, 65_535)


class Sessions(_Section, frozen=True, kw_only=True):
    """The range inside which a worker may choose its session lease."""

    lease_min_s: float = 5
    lease_max_s: float = 600

    def __post_init__(self) -> None:
        _within("sessions.lease_min_s", self.lease_min_s, 5, 600, "seconds")
        _within("sessions.lease_max_s", self.lease_max_s, self.lease_min_s, 600, "seconds")


class Runs(_Section, frozen=True, kw_only=True):
    """The run lease, granted at the claim and at every renewal.

    90 s: a slow router that needs 20 s to start its worker again still finds its lease alive, after a power cut too.
    `on_lease_expiry` says what a lease that ran out makes of a started run: `lost`, or `evidence`, which waits for a statement
    of the worker that the process is gone (D1).
    """

    lease_s: float = 90
    on_lease_expiry: ExpiryPolicy = "lost"

    def __post_init__(self) -> None:
        _within("runs.lease_s", self.lease_s, 5, 600, "seconds")


class LostRetry(msgspec.Struct, frozen=True):
    """How often lost runs are looked after, in seconds, and how many at a time."""

    interval_s: float
    page: int


LOST_RETRY: Final = {"standalone": LostRetry(5, 32), "edge": LostRetry(30, 8)}
"""By profile: a control plane of its own, and a small box that serves a handful of routers (R369, R370)."""


class MaintenanceTerms(_Section, frozen=True, kw_only=True):
    """What the control plane does by itself: how often, and how much at a time (control-plane.md §9.2, §10.6, §11.5).

    Every request of a worker leaves a row in the security audit, which is kept for `audit_retention_s`.
    """

    profile: Literal["standalone", "edge"] = "standalone"
    expiry_interval_s: float = 1
    expiry_page: int = 16
    cancellation_interval_s: float = 1
    cancellation_page: int = 32
    cancellation_pages: int = 4
    audit_retention_s: float = 90 * 86_400

    def __post_init__(self) -> None:
        _within("maintenance.expiry_interval_s", self.expiry_interval_s, 0.25, 3_600, "seconds")
        _within("maintenance.expiry_page", self.expiry_page, 1, 64)
        _within("maintenance.cancellation_interval_s", self.cancellation_interval_s, 0.25, 3_600, "seconds")
        _within("maintenance.cancellation_page", self.cancellation_page, 1, 128)
        _within("maintenance.cancellation_pages", self.cancellation_pages, 1, 64)
        _within("maintenance.audit_retention_s", self.audit_retention_s, 3_600, 3_650 * 86_400, "seconds")

    @property
    def lost_retry(self) -> LostRetry:
        """How lost runs are looked after under the profile."""
        return LOST_RETRY[self.profile]


class Schedule(_Section, frozen=True, kw_only=True):
    """How triggers are fired: how often they are looked at, how many at a time, how long one is taken for, and how late a fire
    time may be before it counts as missed (control-plane.md §19)."""

    interval_s: float = 1
    page: int = 16
    lease_s: float = 30
    grace_s: float = 30

    def __post_init__(self) -> None:
        _within("schedule.interval_s", self.interval_s, 0.25, 3_600, "seconds")
        _within("schedule.page", self.page, 1, 256)
        _within("schedule.lease_s", self.lease_s, 1, 60, "seconds")
        _within("schedule.grace_s", self.grace_s, 0, 300, "seconds")


class RecoveryTerms(_Section, frozen=True, kw_only=True):
    """Under `runs.on_lease_expiry = "evidence"`: how runs that nobody holds are looked after (control-plane.md §16)."""

    interval_s: float = 5
    page: int = 16
    retry_s: float = 5
    freshness_s: float = 30

    def __post_init__(self) -> None:
        _within("recovery.interval_s", self.interval_s, 0.25, 3_600, "seconds")
        _within("recovery.page", self.page, 1, 128)
        _within("recovery.retry_s", self.retry_s, 0.1, 300, "seconds")
        _within("recovery.freshness_s", self.freshness_s, 1, 300, "seconds")


class Limits(_Section, frozen=True, kw_only=True):
    """Bounds of the worker listener (wire-protocol §1.5)."""

    body_bytes: int = 65_536
    in_flight: int = 64
    request_timeout_s: float = 15
    authentication_window_s: float = 60
    authentication_per_peer: int = 120
    authentication_global: int = 1_200
    authentication_peers: int = 4_096

    def __post_init__(self) -> None:
        _within("limits.body_bytes", self.body_bytes, 1_024, 65_536, "bytes")
        _within("limits.in_flight", self.in_flight, 1, 256)
        _within("limits.request_timeout_s", self.request_timeout_s, 0.1, 120, "seconds")
        _within("limits.authentication_window_s", self.authentication_window_s, 1, 3_600, "seconds")
        _within("limits.authentication_per_peer", self.authentication_per_peer, 1, 1_000_000)
        _within("limits.authentication_global", self.authentication_global, 1, 1_000_000)
        _within("limits.authentication_peers", self.authentication_peers, 1, 65_536)


class Dialect(_Section, frozen=True, kw_only=True):
    """Which of the contract's dialects this server speaks (wire-protocol §0.1)."""

    capabilities: Literal["later", "baseline"] = "later"
    secrets: Literal["v2", "v1"] = "v2"


class Settings(_Section, frozen=True, kw_only=True):
    """Everything of the file, with absolute paths after `load`."""

    listen: Listen = Listen()
    tls: Tls = Tls()
    enrolment: Enrolment = Enrolment()
    authority: Authority = Authority()
    storage: Storage = Storage()
    artifacts: Artifacts = Artifacts()
    operator: Operator = Operator()
    metrics: MetricsListener = MetricsListener()
    sessions: Sessions = Sessions()
    runs: Runs = Runs()
    maintenance: MaintenanceTerms = MaintenanceTerms()
    schedule: Schedule = Schedule()
    recovery: RecoveryTerms = RecoveryTerms()
    limits: Limits = Limits()
    dialect: Dialect = Dialect()

    def origin(self, port: int) -> str:
        """How boxes reach a listener of this server that is bound to `port`: `https://name:port`."""
        name = f"[{self.listen.name}]" if ":" in self.listen.name else self.listen.name
        return f"https://{name}:{port}"

    @property
    def database_url(self) -> str:
        """The SQLAlchemy URL. May hold a password: never shown."""
        return self.storage.database or f"sqlite:///{self.storage.data / 'qlcontrol.sqlite'}"

    @property
    def run_lease_ms(self) -> int:
        """Length of a run lease in milliseconds, 5 000 to 600 000."""
        return round(self.runs.lease_s * 1000)

    @property
    def session_lease_min_ms(self) -> int:
        """Shortest session lease a worker may ask for, in milliseconds."""
        return round(self.sessions.lease_min_s * 1000)

    @property
    def session_lease_max_ms(self) -> int:
        """Longest session lease a worker may ask for, in milliseconds."""
        return round(self.sessions.lease_max_s * 1000)

    def rooted_at(self, directory: Path) -> "Settings":
        """These settings with every relative path put below `directory`, which must be absolute.

        Raises ValueError when the socket's path is longer than the kernel takes.
        """

        def rooted(section: Any) -> Any:
            paths = {
                name: Path(os.path.normpath(directory / value))
                for name in section.__struct_fields__
                if isinstance(value := getattr(section, name), Path)
            }
            return msgspec.structs.replace(section, **paths)

        bucket = self.artifacts.bucket
        settings = msgspec.structs.replace(
            self,
            artifacts=self.artifacts if bucket is None else msgspec.structs.replace(self.artifacts, bucket=rooted(bucket)),
            tls=rooted(self.tls),
            authority=rooted(self.authority),
            storage=rooted(self.storage),
            operator=rooted(self.operator),
        )
        length = len(os.fsencode(settings.operator.socket))
        if length > SOCKET_PATH_BYTES:
            raise ValueError(
                f"operator.socket is {length} bytes long, a Unix socket's path must be 1 to {SOCKET_PATH_BYTES} bytes: "
                "name a shorter one, or use a shorter directory"
            )
        return settings
