"""Placement and version ranges: control-plane.md §5.3 (V69)."""

from typing import Any

import pytest

from qlworker.control.services.placement import evaluate
from qlworker.control.services.semver import satisfies
from qlworker.domain.capabilities import TIERS, Capabilities, Capacity, Gpu, InstalledRuntime
from qlworker.domain.revision import Placement, Preference, Required, Runtime

ROUTER = Capabilities(
    architecture="arm64",
    executors=["remote-worker", "wasm"],
    protocol_version="1.2.0",
    support_tier="tier1",
    operating_system="linux",
    runtimes=[InstalledRuntime(name="python", version="3.11.7")],
    labels={"room": "attic"},
    capacity=Capacity(memory_bytes=512, disk_bytes=1024, gpu=[Gpu(vendor="mali")]),
    features=["lte"],
)


@pytest.mark.parametrize(
    ("required", "mismatch"),
    [
        ({}, None),
        ({"architectures": ["amd64", "arm64"]}, None),
        ({"architectures": ["amd64"]}, "architecture"),
        ({"operating_systems": ["linux"]}, None),
        ({"operating_systems": ["darwin"]}, "operating_system"),
        ({"executors": ["remote-worker", "wasm"]}, None),
        ({"executors": ["remote-worker", "docker"]}, "executor"),
        ({"protocol_version_range": "^1.1.0"}, None),
        ({"protocol_version_range": ">=1.3.0"}, "protocol_version"),
        ({"protocol_version_range": "not a range"}, "protocol_version"),
        ({"runtimes": [Runtime(name="python")]}, None),
        ({"runtimes": [Runtime(name="python", version_range=">=3.10 <4")]}, None),
        ({"runtimes": [Runtime(name="python", version_range="^2.7")]}, "runtime"),
        ({"runtimes": [Runtime(name="python", version_range="three")]}, "runtime"),
        ({"runtimes": [Runtime(name="node")]}, "runtime"),
        ({"support_tiers": ["tier1", "candidate"]}, None),
        ({"support_tiers": ["candidate"]}, "support_tier"),
        ({"labels": {"room": "attic"}}, None),
        ({"labels": {"room": "cellar"}}, "label"),
        ({"labels": {"floor": "1"}}, "label"),
        ({"min_memory_bytes": 512}, None),
        ({"min_memory_bytes": 513}, "memory"),
        ({"min_disk_bytes": 1024}, None),
        ({"min_disk_bytes": 1025}, "disk"),
        ({"gpu_vendor": "mali"}, None),
        ({"gpu_vendor": "nvidia"}, "gpu"),
        ({"features": ["lte"]}, None),
        ({"features": ["lte", "gps"]}, "feature"),
    ],
)
def test_every_requirement_that_is_not_met_excludes_the_worker(required: dict[str, Any], mismatch: str | None) -> None:
    assert evaluate(ROUTER, Placement(required=Required(**required))).mismatch == mismatch


def test_an_unknown_amount_satisfies_no_minimum() -> None:
    silent = Capabilities(architecture="mips", executors=["remote-worker"])
    assert evaluate(silent, Placement(required=Required(min_memory_bytes=1))).mismatch == "memory"


@pytest.mark.parametrize(("architecture", "tier"), TIERS.items())
def test_only_tier_one_gets_work_that_names_no_tier(architecture: str, tier: str) -> None:
    worker = Capabilities(architecture=architecture, executors=["remote-worker"], protocol_version="1.0.0", support_tier=tier)
    assert (evaluate(worker, Placement()).mismatch is None) == (tier == "tier1")
    named = Placement(required=Required(support_tiers=[tier]))
    assert evaluate(worker, named).mismatch is None


@pytest.mark.parametrize(("version", "fits"), [("1.0.0", True), ("1.9.9", True), ("2.0.0", False), ("0.9.0", False)])
def test_the_protocol_version_must_be_one_dot_something(version: str, fits: bool) -> None:
    worker = Capabilities(architecture="amd64", executors=["remote-worker"], protocol_version=version, support_tier="tier1")
    assert (evaluate(worker, Placement()).mismatch is None) == fits


def test_the_remote_executor_is_always_required() -> None:
    worker = Capabilities(architecture="amd64", executors=["wasm"])
    assert evaluate(worker, Placement()).mismatch == "executor"


def test_the_score_is_the_sum_of_the_preferences_that_match_wholly() -> None:
    preferred = [
        Preference(labels={"room": "attic"}, weight=3),
        Preference(labels={"room": "attic", "floor": "1"}, weight=50),
        Preference(labels={"room": "attic"}, weight=4),
    ]
    assert evaluate(ROUTER, Placement(preferred=preferred)).score == 7


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("1.2.3", "1.2.3", True),
        ("1.2.3", "=1.2.3", True),
        ("1.2.4", "1.2.3", False),
        ("1.2.3", "*", True),
        ("1.2.3", "", True),
        ("1.2.3", "1.x", True),
        ("2.0.0", "1.x", False),
        ("1.2.9", "~1.2.3", True),
        ("1.3.0", "~1.2.3", False),
        ("1.9.0", "~1", True),
        ("1.9.0", "^1.2.3", True),
        ("2.0.0", "^1.2.3", False),
        ("0.2.9", "^0.2.3", True),
        ("0.3.0", "^0.2.3", False),
        ("0.0.4", "^0.0.3", False),
        ("1.5.0", ">1.2", True),
        ("1.2.9", ">1.2", False),
        ("1.2.9", "<=1.2", True),
        ("1.3.0", "<=1.2", False),
        ("1.2.3", ">= 1.2.3 < 2", True),
        ("1.5.0", "1.2.0 - 1.6.0", True),
        ("1.7.0", "1.2.0 - 1.6.0", False),
        ("3.0.0", "1.x || 3.x", True),
        ("2.0.0", "1.x || 3.x", False),
        ("1.2.3-beta.1", ">=1.0.0", False),
        ("1.2.3-beta.2", ">=1.2.3-beta.1", True),
        ("1.2.3-beta.11", ">1.2.3-beta.2", True),
        ("1.2.3", "<*", False),
    ],
)
def test_version_ranges(version: str, wanted: str, fits: bool) -> None:
    assert satisfies(version, wanted) is fits


def test_a_prerelease_counts_when_asked_for() -> None:
    assert satisfies("1.5.0-rc.1", ">=1.0.0 <2.0.0", include_prereleases=True)


@pytest.mark.parametrize("wanted", ["latest", ">=", "1.2.3.4", "1..2", ">>1", "1.2.3 -"])
def test_an_unreadable_range_is_an_error_not_a_match(wanted: str) -> None:
    with pytest.raises(ValueError, match="range"):
        satisfies("1.2.3", wanted)
