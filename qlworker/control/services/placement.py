"""Whether a worker may run a task, and how well it fits. A pure function; anything unreadable fails closed.

Source: control-plane.md §5.3. The verdict names a category, never the content of a label.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...domain.capabilities import EXECUTOR, Capabilities, Dialect
from ...domain.revision import Placement, Required, Runtime
from .semver import satisfies

PROTOCOL_RANGE: Final = ">=1.0.0 <2.0.0"
DEFAULT_TIER: Final = "tier1"

Mismatch = Literal[
    "architecture",
    "operating_system",
    "executor",
    "protocol_version",
    "runtime",
    "support_tier",
    "label",
    "memory",
    "disk",
    "gpu",
    "feature",
]


class Fit(msgspec.Struct, frozen=True):
    """The verdict: the first requirement that is not met, or None and a score of 0 or more."""

    mismatch: Mismatch | None
    score: int = 0


def evaluate(capabilities: Capabilities, placement: Placement | UnsetType) -> Fit:
    """How a worker with `capabilities` fits a task with `placement`."""
    required = Required() if placement is UNSET or placement.required is UNSET else placement.required
    mismatch = _unmet(capabilities, required)
    if mismatch is not None or placement is UNSET or placement.preferred is UNSET:
        return Fit(mismatch)
    labels = _labels(capabilities)
    return Fit(None, sum(each.weight for each in placement.preferred if _has_all(labels, each.labels)))


def _unmet(have: Capabilities, want: Required) -> Mismatch | None:
    checks: tuple[tuple[Mismatch, bool], ...] = (
        ("architecture", want.architectures is UNSET or have.architecture in want.architectures),
        ("operating_system", want.operating_systems is UNSET or have.operating_system in want.operating_systems),
        ("executor", _has_executors(have, want)),
        ("protocol_version", _speaks(have, want)),
        ("support_tier", _has_tier(have, want)),
        ("runtime", want.runtimes is UNSET or all(_runs(have, runtime) for runtime in want.runtimes)),
        ("label", want.labels is UNSET or _has_all(_labels(have), want.labels)),
        ("memory", want.min_memory_bytes is UNSET or _amount(have, "memory_bytes") >= want.min_memory_bytes),
        ("disk", want.min_disk_bytes is UNSET or _amount(have, "disk_bytes") >= want.min_disk_bytes),
        ("gpu", want.gpu_vendor is UNSET or want.gpu_vendor in _gpu_vendors(have)),
        ("feature", want.features is UNSET or (have.features is not UNSET and set(want.features) <= set(have.features))),
    )
    return next((category for category, met in checks if not met), None)


def _has_executors(have: Capabilities, want: Required) -> bool:
    return {EXECUTOR, *([] if want.executors is UNSET else want.executors)} <= set(have.executors)


def _speaks(have: Capabilities, want: Required) -> bool:
    if have.dialect is Dialect.BASELINE:
        # The baseline has neither version nor tier; a task that asks for one cannot be given away.
        return want.protocol_version_range is UNSET
    if have.protocol_version is UNSET:
        return False
    wanted = [PROTOCOL_RANGE] if want.protocol_version_range is UNSET else [PROTOCOL_RANGE, want.protocol_version_range]
    return all(_in_range(have.protocol_version, each, include_prereleases=True) for each in wanted)


def _has_tier(have: Capabilities, want: Required) -> bool:
    if have.dialect is Dialect.BASELINE:
        return want.support_tiers is UNSET
    return have.support_tier in ([DEFAULT_TIER] if want.support_tiers is UNSET else want.support_tiers)


def _runs(have: Capabilities, want: Runtime) -> bool:
    installed = [] if have.runtimes is UNSET else [each.version for each in have.runtimes if each.name == want.name]
    if want.version_range is UNSET:
        return bool(installed)
    return any(_in_range(version, want.version_range) for version in installed)


def _in_range(version: str, wanted: str, *, include_prereleases: bool = False) -> bool:
    try:
        return satisfies(version, wanted, include_prereleases=include_prereleases)
    except ValueError:
        return False


def _labels(have: Capabilities) -> Mapping[str, str]:
    return {} if have.labels is UNSET else have.labels


def _has_all(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _amount(have: Capabilities, name: Literal["memory_bytes", "disk_bytes"]) -> int:
    """What the worker reported, or 0: an unknown amount satisfies no minimum."""
    value: int | UnsetType = UNSET if have.capacity is UNSET else getattr(have.capacity, name)
    return 0 if value is UNSET else value


def _gpu_vendors(have: Capabilities) -> set[str]:
    if have.capacity is UNSET or have.capacity.gpu is UNSET:
        return set()
    return {gpu.vendor for gpu in have.capacity.gpu}
