"""The capabilities document: what a worker tells the control plane about its box, in both dialects.

The control plane parses the text, normalises it and refuses it unless its own text is byte-equal, so the text is canonical
here. Source: wire-protocol.md §0.1 and §2.2. Checked against the golden vectors.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, Self

import msgspec
from msgspec import UNSET, UnsetType

from .canonical import code_unit_sorted, collation_key, ordered_labels, sha256_hex
from .document import Document
from .errors import Misconfigured
from .text import check_integer, check_text, utf16_length

DOCUMENT_BYTES: Final = 16 * 1024
PROTOCOL_VERSION: Final = "1.0.0"
EXECUTOR: Final = "remote-worker"
LABELS: Final = 32
FEATURES: Final = 32
RUNTIMES: Final = 32

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}\Z")
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")
_SEMVER: Final = re.compile(
    r"(?:0|[1-9][0-9]*)(?:\.(?:0|[1-9][0-9]*)){2}"
    r"(?:-(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)(?:\.(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*))*)?"
    r"(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?\Z"
)

TIERS: Final[Mapping[str, str]] = {
    "amd64": "tier1",
    "arm64": "tier1",
    "ppc64le": "candidate",
    "s390x": "candidate",
    "arm/v7": "experimental",
    "arm/v6": "legacy-only",
    "386": "legacy-only",
}

# uname's machine -> (baseline name, later name). The baseline takes any name; the later dialect has a closed list, so MIPS,
# RISC-V and LoongArch boxes cannot speak it at all.
_ARCHITECTURES: Final[Mapping[str, tuple[str, str | None]]] = {
    "x86_64": ("x64", "amd64"),
    "aarch64": ("arm64", "arm64"),
    "armv8l": ("arm", "arm/v7"),
    "armv7l": ("arm", "arm/v7"),
    "armv6l": ("arm", "arm/v6"),
    "armv5tel": ("arm", None),
    "armv5tejl": ("arm", None),
    "i386": ("ia32", "386"),
    "i486": ("ia32", "386"),
    "i586": ("ia32", "386"),
    "i686": ("ia32", "386"),
    "ppc64le": ("ppc64", "ppc64le"),
    "s390x": ("s390x", "s390x"),
    "loongarch64": ("loong64", None),
}

# What a 32-bit userland on a 64-bit kernel runs: uname tells the kernel's side.
_COMPAT: Final[Mapping[str, str]] = {"x86_64": "i686", "aarch64": "armv7l"}


class Dialect(StrEnum):
    """How a control plane wants capabilities (wire-protocol §0.1). The later one adds version and tier and closes the list
    of architectures."""

    BASELINE = "baseline"
    LATER = "later"


def check_name(value: str, name: str, maximum: int = 64) -> str:
    """1..`maximum` (at most 64) of `[a-z0-9._+-]`, first alphanumeric."""
    if not _NAME.match(value) or len(value) > maximum:
        raise ValueError(f"{name} must be 1 to {maximum} of [a-z0-9._+-], starting with a letter or digit")
    return value


def check_version(value: str, name: str) -> str:
    """A semantic version of 1..64 characters."""
    if len(value) > 64 or not _SEMVER.match(value):
        raise ValueError(f"{name} must be a semantic version of at most 64 characters")
    return value


def check_labels(labels: Mapping[str, str]) -> None:
    """At most 32 labels; a key has 1..128 of `[A-Za-z0-9._/-]`, a value 1..256 characters without control characters."""
    if len(labels) > LABELS:
        raise ValueError(f"labels must be at most {LABELS}")
    for key, value in labels.items():
        if not _LABEL.match(key):
            raise ValueError("a label's key must be 1 to 128 of [A-Za-z0-9._/-], starting with a letter or digit")
        check_text(value, "a label's value", maximum=4 * 256)
        if not 1 <= utf16_length(value) <= 256:
            raise ValueError("a label's value must be 1 to 256 characters")


def check_features(features: Iterable[str]) -> None:
    """At most 32 names without repeats."""
    _check_unique([check_name(feature, "a feature") for feature in features], "features", FEATURES)


def _check_unique(names: list[str], what: str, maximum: int) -> None:
    if len(names) > maximum or len(set(names)) != len(names):
        raise ValueError(f"{what} must be at most {maximum}, without repeats")


class InstalledRuntime(Document, frozen=True, kw_only=True):
    """An interpreter that tasks may ask for, with its semantic version."""

    name: str
    version: str

    def __post_init__(self) -> None:
        check_name(self.name, "a runtime's name")
        check_version(self.version, "a runtime's version")


class Gpu(Document, frozen=True, kw_only=True):
    """One graphics processor. `memory_bytes` is a positive safe integer."""

    vendor: str
    model: str | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_name(self.vendor, "a gpu's vendor")
        if self.model is not UNSET:
            check_text(self.model, "a gpu's model", minimum=1, maximum=4 * 128)
            if utf16_length(self.model) > 128:
                raise ValueError("a gpu's model must be 1 to 128 characters")
        if self.memory_bytes is not UNSET:
            check_integer(self.memory_bytes, "a gpu's memoryBytes", 1)


class Capacity(Document, frozen=True, kw_only=True):
    """How much of everything: 1..4096 cores, positive byte counts, at most 8 graphics processors."""

    cpu_cores: int | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET
    disk_bytes: int | UnsetType = UNSET
    gpu: list[Gpu] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.cpu_cores is not UNSET:
            check_integer(self.cpu_cores, "capacity.cpuCores", 1, 4096)
        for value, name in ((self.memory_bytes, "memoryBytes"), (self.disk_bytes, "diskBytes")):
            if value is not UNSET:
                check_integer(value, f"capacity.{name}", 1)
        if self.gpu is not UNSET and len(self.gpu) > 8:
            raise ValueError("capacity.gpu must have at most 8 entries")


class Capabilities(Document, frozen=True, kw_only=True):
    """One worker's document. Field order is the canonical member order; version and tier make it the later dialect's."""

    architecture: str
    executors: list[str]
    protocol_version: str | UnsetType = UNSET
    support_tier: str | UnsetType = UNSET
    operating_system: str | UnsetType = UNSET
    runtimes: list[InstalledRuntime] | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET
    capacity: Capacity | UnsetType = UNSET
    features: list[str] | UnsetType = UNSET

    def __post_init__(self) -> None:
        self._check_dialect()
        _check_unique([check_name(name, "an executor") for name in self.executors], "executors", 16)
        if not self.executors:
            raise ValueError("executors must have 1 to 16 entries")
        if self.operating_system is not UNSET:
            check_name(self.operating_system, "operatingSystem", 32)
        if self.runtimes is not UNSET:
            _check_unique([runtime.name for runtime in self.runtimes], "runtimes", RUNTIMES)
        if self.labels is not UNSET:
            check_labels(self.labels)
        if self.features is not UNSET:
            check_features(self.features)

    def _check_dialect(self) -> None:
        if self.protocol_version is UNSET and self.support_tier is UNSET:
            check_name(self.architecture, "architecture", 32)
        elif self.protocol_version is UNSET or self.support_tier is UNSET:
            raise ValueError("protocolVersion and supportTier belong together")
        else:
            check_version(self.protocol_version, "protocolVersion")
            if TIERS.get(self.architecture) != self.support_tier:
                raise ValueError(f"architecture must be one of {', '.join(TIERS)}, with supportTier its tier")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The document in `text`. Raises ValueError unless it is canonical and at most 16 KiB."""
        if len(text.encode()) > DOCUMENT_BYTES:
            raise ValueError(f"capabilities must be at most {DOCUMENT_BYTES} bytes")
        try:
            document = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"capabilities must be one object of the documented members: {error}") from error
        if document.text() != text:
            raise ValueError("capabilities must be canonical")
        return document

    @property
    def dialect(self) -> Dialect:
        """Whose form this is."""
        return Dialect.BASELINE if self.protocol_version is UNSET else Dialect.LATER

    def canonical(self) -> Self:
        """The same document, sorted as the control plane sorts it."""
        return msgspec.structs.replace(
            self,
            executors=code_unit_sorted(self.executors),
            runtimes=UNSET
            if self.runtimes is UNSET
            else sorted(self.runtimes, key=lambda runtime: collation_key(runtime.name)),
            labels=UNSET if self.labels is UNSET else ordered_labels(self.labels),
            features=UNSET if self.features is UNSET else code_unit_sorted(self.features),
        )

    def text(self) -> str:
        """`capabilitiesJson` as it is sent. Raises ValueError above 16 KiB."""
        data = self.canonical().to_json()
        if len(data) > DOCUMENT_BYTES:
            raise ValueError(f"capabilities must be at most {DOCUMENT_BYTES} bytes: use fewer or shorter labels")
        return data.decode()

    def digest(self) -> str:
        """`capabilitiesHash`: SHA-256 over the text."""
        return sha256_hex(self.text().encode())


class MachineFacts(msgspec.Struct, frozen=True):
    """What was found on this box. `machine` is uname's word; 0 means: could not be told.

    Byte counts are totals, never what is free: the document of a box must not change from one start to the next.
    """

    machine: str
    is_64_bit: bool
    is_little_endian: bool
    cpu_cores: int
    memory_bytes: int
    disk_bytes: int
    runtimes: list[InstalledRuntime]


def architecture(facts: MachineFacts, dialect: Dialect) -> str:
    """The dialect's name for the programs that run here. Raises Misconfigured when the later dialect has none."""
    machine = facts.machine
    if not facts.is_64_bit:
        machine = _COMPAT.get(machine, machine)
    if machine in {"mips", "mips64"} and facts.is_little_endian:
        machine += "el"  # the kernel says "mips" for both byte orders
    baseline, later = _ARCHITECTURES.get(machine, (machine, None))
    if dialect is Dialect.BASELINE:
        return baseline.lower()
    if later is None:
        raise Misconfigured(
            f"the later capabilities dialect has no name for the architecture {machine}: "
            'set control_plane.capabilities_dialect = "baseline", and use a control plane that speaks it'
        )
    return later


def has_dialect(facts: MachineFacts, dialect: Dialect) -> bool:
    """Whether this box can be described in `dialect` at all."""
    try:
        architecture(facts, dialect)
    except Misconfigured:
        return False
    return True


def describe(facts: MachineFacts, dialect: Dialect, labels: Mapping[str, str], features: Iterable[str]) -> Capabilities:
    """The canonical document of this box. Raises Misconfigured when `dialect` has no name for its architecture."""
    name = architecture(facts, dialect)
    later = dialect is Dialect.LATER
    return Capabilities(
        architecture=name,
        executors=[EXECUTOR],
        protocol_version=PROTOCOL_VERSION if later else UNSET,
        support_tier=TIERS[name] if later else UNSET,
        operating_system="linux",
        runtimes=facts.runtimes,
        labels=dict(labels),
        capacity=Capacity(
            cpu_cores=facts.cpu_cores or UNSET,
            memory_bytes=facts.memory_bytes or UNSET,
            disk_bytes=facts.disk_bytes or UNSET,
        ),
        features=list(features),
    ).canonical()
