"""The file an operator describes a task in, and the execution revision it stands for.

Every bound of a revision is checked when the file is read, before anything is sent or stored.
"""

import re
import tomllib
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..domain.canonical import js_json, sha256_hex
from ..domain.errors import Misconfigured
from ..domain.revision import (
    TIMEOUT_MS,
    ArgvCommand,
    Binding,
    ExecutionRevision,
    Placement,
    Preference,
    Required,
    Runtime,
    SecretReference,
    ShellCommand,
    task_revision,
)
from ..domain.text import INT31, SAFE_INTEGER, check_dispatch_id, check_integer, check_worker_id
from .retry_policy import RetryTerms
from .schedule.cron import check_cron, check_zone

TASK_FILE_BYTES: Final = 256 * 1024
TRIGGERS: Final = 16

_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:+-]{0,127}\Z")
_TRIGGER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_UNPUBLISHED: Final = "0" * 64


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a task file; an unknown key is refused."""


class Command(_Table, frozen=True, kw_only=True):
    """Either `shell`, a script for `interpreter`, or `program` by absolute path with `arguments`."""

    shell: str | None = None
    interpreter: str | None = None
    program: str | None = None
    arguments: list[str] = []


class Environment(_Table, frozen=True, kw_only=True):
    """`public` holds values, `secret` names of secrets of the project, `bundle` a stored environment as `name@version`."""

    public: dict[str, str] = {}
    secret: dict[str, str] = {}
    bundle: str | None = None


class Preferred(_Table, frozen=True, kw_only=True):
    """A worker with all these labels is preferred by `weight`, 1 to 100."""

    labels: dict[str, str]
    weight: int


class Where(_Table, frozen=True, kw_only=True):
    """What a worker must have, and what is preferred. A runtime's value is a semver range, `"*"` for any version."""

    architectures: list[str] | None = None
    operating_systems: list[str] | None = None
    protocol_version_range: str | None = None
    runtimes: dict[str, str] | None = None
    support_tiers: list[str] | None = None
    labels: dict[str, str] | None = None
    min_memory_bytes: int | None = None
    min_disk_bytes: int | None = None
    gpu_vendor: str | None = None
    features: list[str] | None = None
    preferred: list[Preferred] | None = None


class TriggerDefinition(_Table, frozen=True, kw_only=True):
    """When the task runs by itself: a cron line in a time zone. `misfire` is what becomes of a time that nobody was there for,
    `if_running` of one that comes while an earlier run of this trigger is not over."""

    name: str
    cron: str
    timezone: str = "UTC"
    misfire: Literal["skip", "run_once"] = "skip"
    if_running: Literal["skip", "queue", "allow", "kill"] = "skip"
    enabled: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        if not _TRIGGER_NAME.match(self.name):
            raise ValueError("a trigger's name must be 1 to 64 of [A-Za-z0-9._-], starting with a letter or digit")
        check_cron(self.cron)
        check_zone(self.timezone)
        check_integer(self.priority, "a trigger's priority", -SAFE_INTEGER, SAFE_INTEGER)


class TaskDefinition(_Table, frozen=True, kw_only=True):
    """The content of a task file. `revision` pins a number, `timeout_s` is 0.001 s to 365 days, `worker` names the only one
    that may run it."""

    project: str
    id: str
    command: Command
    environment: Environment = Environment()
    working_directory: str | None = None
    timeout_s: float | None = None
    placement: Where | None = None
    worker: str | None = None
    retry: RetryTerms | None = None
    revision: int | None = None
    triggers: list[TriggerDefinition] = []

    def __post_init__(self) -> None:
        check_dispatch_id(self.project, "project")
        check_dispatch_id(self.id, "id")
        if self.worker is not None:
            check_worker_id(self.worker)
        if self.timeout_s is not None and not 0.001 <= self.timeout_s <= TIMEOUT_MS / 1000:
            raise ValueError(f"timeout_s is {self.timeout_s:g}, it must be 0.001 to {TIMEOUT_MS // 1000} seconds")
        if self.revision is not None:
            check_integer(self.revision, "revision", 1, INT31)
        if len(self.triggers) > TRIGGERS or len({each.name for each in self.triggers}) != len(self.triggers):
            raise ValueError(f"a task has at most {TRIGGERS} triggers, each with a name of its own")
        self.execution()  # every bound of a revision, before anything is sent or stored

    def execution(self, number: int = 1, created_at_ms: int = 0) -> ExecutionRevision:
        """This definition as the canonical revision `number`. Raises ValueError for what a revision may not hold."""
        content = msgspec.to_builtins(self)
        for name in ("revision", "triggers"):  # neither the number nor when it runs is part of what it does
            content.pop(name, None)
        source = sha256_hex(js_json(content))
        return ExecutionRevision(
            project_id=self.project,
            task_id=self.id,
            task_revision=task_revision(number, source),
            source_revision=number,
            source_content_digest=source,
            executor_type="remote_worker",
            plan_schema="qinglong/command-execution@v1",
            command=_command(self.command),
            environment=self._bindings(),
            environment_bundle_ref=self._bundle(),
            working_directory=UNSET if self.working_directory is None else self.working_directory,
            timeout_ms=UNSET if self.timeout_s is None else round(self.timeout_s * 1000),
            placement=UNSET if self.placement is None else _placement(self.placement),
            created_at_ms=created_at_ms,
            content_digest=_UNPUBLISHED,
        ).canonical()

    def _bindings(self) -> list[Binding]:
        public = [Binding(name=name, kind="public", value=value) for name, value in self.environment.public.items()]
        secret = [
            Binding(name=name, kind="secret", secret_ref=self._reference(wanted).text())
            for name, wanted in self.environment.secret.items()
        ]
        return public + secret

    def _bundle(self) -> str | UnsetType:
        if self.environment.bundle is None:
            return UNSET
        name, _, version = self.environment.bundle.rpartition("@")
        if not name or not version.isascii() or not version.isdigit() or len(version) > 10:
            raise ValueError("environment.bundle must be name@version with a version of 1 to 2147483647")
        return msgspec.structs.replace(self._reference(name), version=int(version)).text()

    def _reference(self, name: str) -> SecretReference:
        check_secret_name(self.project, "the project of a task with secrets")
        return SecretReference(project_id=self.project, name=check_secret_name(name))


def check_secret_name(name: str, what: str = "a secret's name") -> str:
    """1 to 128 of `[A-Za-z0-9._:+-]` and `_`, first a letter, a digit or `_`: it names a file. Raises ValueError."""
    if not _SECRET_NAME.match(name):
        raise ValueError(f"{what} must be 1 to 128 of [A-Za-z0-9._:+-], starting with a letter, a digit or _")
    return name


def parse_task(data: bytes, name: str) -> TaskDefinition:
    """The task in the TOML text `data`; `name` is the file's name for the error.

    Raises Misconfigured with the file, the key and what is allowed, never with a value: a secret may stand in the wrong place.
    """
    if len(data) > TASK_FILE_BYTES:
        raise Misconfigured(f"cannot use {name}: it is longer than {TASK_FILE_BYTES} bytes")
    try:
        return msgspec.convert(tomllib.loads(data.decode()), TaskDefinition)
    except UnicodeDecodeError as error:
        raise Misconfigured(f"cannot use {name}: it is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(f"cannot use {name}: it is not TOML: {error}") from error
    except ValueError as error:
        raise Misconfigured(f"cannot use {name}: {error}") from error


def task_text(definition: TaskDefinition, notes: list[str]) -> str:
    """The definition as a task file, with `notes` as comments above it."""
    content = msgspec.to_builtins(definition)
    triggers = content.pop("triggers", [])
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    lines = [f"# {note}" for note in notes]
    lines += [f"{name} = {_toml(value)}" for name, value in content.items() if name not in tables]
    headed = [(f"[{name}]", table) for name, table in tables.items()] + [("[[triggers]]", each) for each in triggers]
    for header, table in headed:
        lines += ["", header, *(f"{name} = {_toml(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value of a task file. JSON's texts, numbers and lists are TOML's too, but for DEL, which TOML wants escaped."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _command(command: Command) -> ArgvCommand | ShellCommand:
    if (command.shell is None) is (command.program is None):
        raise ValueError("[command] must have exactly one of shell and program")
    if command.shell is not None:
        if command.arguments:
            raise ValueError("[command] with shell takes no arguments")
        if command.interpreter not in {None, "/bin/sh", "/bin/bash"}:
            raise ValueError("command.interpreter must be /bin/sh or /bin/bash")
        members = {"kind": "shell", "command": command.shell}
        return msgspec.convert(members | ({"shell": command.interpreter} if command.interpreter else {}), ShellCommand)
    if command.interpreter is not None:
        raise ValueError("[command] with program takes no interpreter")
    return ArgvCommand(file=command.program or "", args=command.arguments)


def _placement(where: Where) -> Placement:
    def given(value: Any) -> Any:
        return UNSET if value is None else value

    required = Required(
        architectures=given(where.architectures),
        operating_systems=given(where.operating_systems),
        protocol_version_range=given(where.protocol_version_range),
        runtimes=UNSET
        if where.runtimes is None
        else [
            Runtime(name=name, version_range=UNSET if versions == "*" else versions)
            for name, versions in where.runtimes.items()
        ],
        support_tiers=given(where.support_tiers),
        labels=given(where.labels),
        min_memory_bytes=given(where.min_memory_bytes),
        min_disk_bytes=given(where.min_disk_bytes),
        gpu_vendor=given(where.gpu_vendor),
        features=given(where.features),
    )
    preferred = (
        UNSET if where.preferred is None else [Preference(labels=each.labels, weight=each.weight) for each in where.preferred]
    )
    return Placement(required=required, preferred=preferred)
