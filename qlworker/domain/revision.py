"""The immutable execution revision: what to run, with which environment, where, and the digest that pins it.

Source: wire-protocol.md §4.3 to §4.6, control-plane.md §1.7.
"""

import re
from typing import Final, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from .canonical import b64u, code_unit_sorted, collation_key, digests_equal, from_b64u, js_json, ordered_labels, sha256_hex
from .document import Document
from .text import INT31, check_digest, check_integer, check_text

PLAN_BYTES: Final = 96 * 1024
ENVIRONMENT_BYTES: Final = 64 * 1024
ENVIRONMENT_ITEMS: Final = 256
ARGUMENTS: Final = 256
ARGUMENT_BYTES: Final = 16 * 1024
COMMAND_BYTES: Final = 64 * 1024
TIMEOUT_MS: Final = 365 * 24 * 3600 * 1000

_DOMAIN: Final = b"qinglong.cluster-task-execution-revision.v1\x00"
_REFERENCE_PREFIX: Final = "qlsecret:v1:"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


def check_environment_name(name: str) -> str:
    """`[A-Za-z_][A-Za-z0-9_]{0,127}`, not starting with `QL3_` (wire-protocol §4.5)."""
    if not _NAME.match(name) or name.startswith("QL3_"):
        raise ValueError("an environment name must be 1 to 128 of [A-Za-z0-9_], not start with a digit or with QL3_")
    return name


class ArgvCommand(Document, frozen=True, kw_only=True, tag_field="kind", tag="argv"):
    """A program by absolute path with at most 256 arguments; together at most 64 KiB. An empty argument is legal."""

    file: str
    args: list[str]

    def __post_init__(self) -> None:
        check_text(self.file, "command.file", minimum=1, maximum=4096, controls=True)
        if not self.file.startswith("/"):
            raise ValueError("command.file must be an absolute path")
        if len(self.args) > ARGUMENTS:
            raise ValueError(f"command.args must have at most {ARGUMENTS} entries")
        for argument in self.args:
            check_text(argument, "command.args", maximum=ARGUMENT_BYTES, controls=True)
        if len(self.file.encode()) + sum(len(argument.encode()) for argument in self.args) > COMMAND_BYTES:
            raise ValueError(f"command.file and command.args must be at most {COMMAND_BYTES} bytes together")


class ShellCommand(Document, frozen=True, kw_only=True, tag_field="kind", tag="shell"):
    """A script of 1 byte to 64 KiB for `/bin/sh` or `/bin/bash`."""

    command: str
    shell: Literal["/bin/sh", "/bin/bash"] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_text(self.command, "command.command", minimum=1, maximum=COMMAND_BYTES, controls=True)


class Binding(Document, frozen=True, kw_only=True):
    """One variable: `public` with its value, which may be empty, or `secret` with the reference its value is delivered for."""

    name: str
    kind: Literal["public", "secret"]
    value: str | UnsetType = UNSET
    secret_ref: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_environment_name(self.name)
        if (self.value is UNSET) is (self.kind == "public") or (self.secret_ref is UNSET) is (self.kind == "secret"):
            raise ValueError("a public binding has exactly a value, a secret binding exactly a secretRef")
        if self.value is not UNSET:
            check_text(self.value, "environment value", maximum=ENVIRONMENT_BYTES, controls=True)
        if self.secret_ref is not UNSET:
            SecretReference.parse(self.secret_ref)

    def size(self) -> int:
        """Bytes this binding counts towards the environment's limit."""
        content = self.secret_ref if self.value is UNSET else self.value
        return len(self.name.encode()) + (0 if content is UNSET else len(content.encode()))


class SecretReference(Document, frozen=True, kw_only=True):
    """What a secret reference names: a project's secret, and for bundles its version (wire-protocol §4.5)."""

    project_id: str
    name: str
    version: int | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_text(self.project_id, "secretRef.projectId", minimum=1, maximum=128)
        check_text(self.name, "secretRef.name", minimum=1, maximum=128)
        if self.version is not UNSET:
            check_integer(self.version, "secretRef.version", 1, INT31)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reference in `text`. Raises ValueError unless it is canonical and at most 512 bytes."""
        if not text.startswith(_REFERENCE_PREFIX) or len(text) > 512:
            raise ValueError(f"a secretRef must start with {_REFERENCE_PREFIX} and be at most 512 bytes")
        try:
            reference = msgspec.json.decode(from_b64u(text.removeprefix(_REFERENCE_PREFIX)), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError("a secretRef must hold canonical base64url of a reference") from error
        if reference.text() != text:
            raise ValueError("a secretRef must be canonical")
        return reference

    def text(self) -> str:
        """This reference as it stands in a revision."""
        return _REFERENCE_PREFIX + b64u(self.to_json())


class Runtime(Document, frozen=True, kw_only=True):
    """A runtime a task needs, with an optional semver range."""

    name: str
    version_range: str | UnsetType = UNSET


class Required(Document, frozen=True, kw_only=True):
    """Hard placement requirements; any that is not met excludes a worker (control-plane.md §5.3)."""

    architectures: list[str] | UnsetType = UNSET
    operating_systems: list[str] | UnsetType = UNSET
    executors: list[str] | UnsetType = UNSET
    protocol_version_range: str | UnsetType = UNSET
    runtimes: list[Runtime] | UnsetType = UNSET
    support_tiers: list[str] | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET
    min_memory_bytes: int | UnsetType = UNSET
    min_disk_bytes: int | UnsetType = UNSET
    gpu_vendor: str | UnsetType = UNSET
    features: list[str] | UnsetType = UNSET

    def __post_init__(self) -> None:
        for listed in (
            self.architectures,
            self.operating_systems,
            self.executors,
            self.runtimes,
            self.support_tiers,
            self.labels,
            self.features,
        ):
            if listed is not UNSET and len(listed) > 16:
                raise ValueError("a placement list must have at most 16 entries")

    def canonical(self) -> "Required":
        """Lists in code unit order, runtimes and labels by root collation, executors always present (§4.6)."""

        def names(listed: list[str] | UnsetType) -> list[str] | UnsetType:
            return UNSET if listed is UNSET else code_unit_sorted(set(listed))

        return msgspec.structs.replace(
            self,
            architectures=names(self.architectures),
            operating_systems=names(self.operating_systems),
            executors=names(["remote-worker"] if self.executors is UNSET else self.executors),
            runtimes=UNSET
            if self.runtimes is UNSET
            else sorted(self.runtimes, key=lambda runtime: collation_key(runtime.name)),
            support_tiers=names(self.support_tiers),
            labels=UNSET if self.labels is UNSET else ordered_labels(self.labels),
            features=names(self.features),
        )


class Preference(Document, frozen=True, kw_only=True):
    """Labels that raise a worker's score by `weight` (1..100) when all of them match."""

    labels: dict[str, str]
    weight: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.labels) <= 16:
            raise ValueError("preferred labels must be 1 to 16")
        check_integer(self.weight, "preferred weight", 1, 100)


class Placement(Document, frozen=True, kw_only=True):
    """Where a task may run. A worker uses it only for the digest."""

    required: Required | UnsetType = UNSET
    preferred: list[Preference] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.preferred is not UNSET and len(self.preferred) > 16:
            raise ValueError("preferred must have at most 16 entries")

    def canonical(self) -> "Placement":
        """The form the control plane stores and sends."""
        required = Required() if self.required is UNSET else self.required
        preferred: list[Preference] | UnsetType = UNSET
        if self.preferred is not UNSET:
            preferred = [msgspec.structs.replace(each, labels=ordered_labels(each.labels)) for each in self.preferred]
        return Placement(required=required.canonical(), preferred=preferred)


class ExecutionRevision(Document, frozen=True, kw_only=True):
    """One published version of a task. Field order is the canonical member order of wire-protocol §4.3."""

    project_id: str
    task_id: str
    task_revision: str
    source_revision: int
    source_content_digest: str
    executor_type: Literal["remote_worker"]
    plan_schema: Literal["qinglong/command-execution@v1"]
    command: ArgvCommand | ShellCommand
    environment: list[Binding]
    environment_bundle_ref: str | UnsetType = UNSET
    working_directory: str | UnsetType = UNSET
    timeout_ms: int | UnsetType = UNSET
    placement: Placement | UnsetType = UNSET
    created_at_ms: int
    content_digest: str

    def __post_init__(self) -> None:
        check_text(self.project_id, "projectId", minimum=1, maximum=128)
        check_text(self.task_id, "taskId", minimum=1, maximum=128)
        check_integer(self.source_revision, "sourceRevision", 1, INT31)
        check_digest(self.source_content_digest, "sourceContentDigest")
        if self.task_revision != task_revision(self.source_revision, self.source_content_digest):
            raise ValueError("taskRevision must name sourceRevision and sourceContentDigest")
        self._check_environment()
        if self.working_directory is not UNSET:
            check_text(self.working_directory, "workingDirectory", minimum=1, maximum=4096, controls=True)
            if not self.working_directory.startswith("/"):
                raise ValueError("workingDirectory must be an absolute path")
        if self.timeout_ms is not UNSET:
            check_integer(self.timeout_ms, "timeoutMs", 1, TIMEOUT_MS)
        check_integer(self.created_at_ms, "createdAtMs")
        check_digest(self.content_digest, "contentDigest")

    def _check_environment(self) -> None:
        names = [binding.name for binding in self.environment]
        if len(names) > ENVIRONMENT_ITEMS or len(set(names)) != len(names):
            raise ValueError(f"environment must have at most {ENVIRONMENT_ITEMS} bindings with unique names")
        if sum(binding.size() for binding in self.environment) > ENVIRONMENT_BYTES:
            raise ValueError(f"environment must be at most {ENVIRONMENT_BYTES} bytes")
        for reference in self.secret_refs():
            self._check_project(reference, versioned=False)
        if self.environment_bundle_ref is not UNSET:
            self._check_project(self.environment_bundle_ref, versioned=True)

    def _check_project(self, text: str, *, versioned: bool) -> None:
        reference = SecretReference.parse(text)
        if reference.project_id != self.project_id:
            raise ValueError("a secretRef must belong to the revision's project")
        if versioned and reference.version is UNSET:
            raise ValueError("environmentBundleRef must name a version")

    def plan(self) -> dict[str, object]:
        """Members 1 to 14 in canonical order, as received: the size limit of 96 KiB applies to their js-json."""
        members = self.members()
        del members["contentDigest"]
        return members

    def computed_digest(self) -> str:
        """The digest over members 1 to 13 in the order received, so that no host's locale matters (§4.3)."""
        plan = self.plan()
        del plan["createdAtMs"]
        return sha256_hex(_DOMAIN + js_json(plan))

    def verify(self) -> None:
        """Raises ValueError when the plan is above 96 KiB or its digest differs (R123)."""
        if len(js_json(self.plan())) > PLAN_BYTES:
            raise ValueError(f"an execution revision must be at most {PLAN_BYTES} bytes")
        if not digests_equal(self.computed_digest(), self.content_digest):
            raise ValueError("contentDigest does not match the execution revision")

    def canonical(self) -> "ExecutionRevision":
        """The same revision in the form a control plane publishes: sorted, and with its digest computed."""
        sorted_revision = msgspec.structs.replace(
            self,
            environment=sorted(self.environment, key=lambda binding: collation_key(binding.name)),
            placement=UNSET if self.placement is UNSET else self.placement.canonical(),
        )
        return msgspec.structs.replace(sorted_revision, content_digest=sorted_revision.computed_digest())

    def secret_refs(self) -> list[str]:
        """References of the secret bindings in the order received, without repeats (wire-protocol §6.2)."""
        return list(dict.fromkeys(b.secret_ref for b in self.environment if b.secret_ref is not UNSET))


def task_revision(source_revision: int, source_content_digest: str) -> str:
    """The name of a revision: `qltd:v1:` with its number and the digest of its source (wire-protocol §4.3)."""
    return f"qltd:v1:{source_revision}:{source_content_digest}"
