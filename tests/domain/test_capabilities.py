"""The capabilities document: bounds, both dialects, and the names of architectures."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.capabilities import (
    TIERS,
    Capabilities,
    Capacity,
    Dialect,
    Gpu,
    InstalledRuntime,
    MachineFacts,
    architecture,
    check_version,
    describe,
    has_dialect,
)
from qlworker.domain.errors import Misconfigured


def facts(machine: str = "x86_64", **changes: Any) -> MachineFacts:
    found = MachineFacts(
        machine=machine,
        is_64_bit=True,
        is_little_endian=True,
        cpu_cores=2,
        memory_bytes=268435456,
        disk_bytes=1024,
        runtimes=[InstalledRuntime(name="python", version="3.11.7")],
    )
    return msgspec.structs.replace(found, **changes)


def make(**changes: Any) -> Capabilities:
    return Capabilities(**{"architecture": "x64", "executors": ["remote-worker"], **changes})


@pytest.mark.parametrize(
    ("machine", "is_64_bit", "is_little_endian", "baseline", "later"),
    [
        ("x86_64", True, True, "x64", "amd64"),
        ("x86_64", False, True, "ia32", "386"),
        ("i686", False, True, "ia32", "386"),
        ("aarch64", True, True, "arm64", "arm64"),
        ("aarch64", False, True, "arm", "arm/v7"),
        ("armv8l", False, True, "arm", "arm/v7"),
        ("armv7l", False, True, "arm", "arm/v7"),
        ("armv6l", False, True, "arm", "arm/v6"),
        ("ppc64le", True, True, "ppc64", "ppc64le"),
        ("s390x", True, False, "s390x", "s390x"),
    ],
)
def test_an_architecture_has_a_name_in_each_dialect(
    machine: str, is_64_bit: bool, is_little_endian: bool, baseline: str, later: str
) -> None:
    found = facts(machine, is_64_bit=is_64_bit, is_little_endian=is_little_endian)

    assert architecture(found, Dialect.BASELINE) == baseline
    assert architecture(found, Dialect.LATER) == later
    assert describe(found, Dialect.LATER, {}, []).support_tier == TIERS[later]


@pytest.mark.parametrize(
    ("machine", "is_little_endian", "baseline"),
    [
        ("mips", False, "mips"),
        ("mips", True, "mipsel"),
        ("mips64", True, "mips64el"),
        ("armv5tel", True, "arm"),
        ("riscv64", True, "riscv64"),
        ("loongarch64", True, "loong64"),
    ],
)
def test_an_architecture_without_a_later_name_speaks_the_baseline_only(
    machine: str, is_little_endian: bool, baseline: str
) -> None:
    found = facts(machine, is_little_endian=is_little_endian)

    assert describe(found, Dialect.BASELINE, {}, []).architecture == baseline
    assert has_dialect(found, Dialect.BASELINE)
    assert not has_dialect(found, Dialect.LATER)
    with pytest.raises(Misconfigured, match=r"has no name for the architecture .*set control_plane.capabilities_dialect"):
        describe(found, Dialect.LATER, {}, [])


def test_what_is_not_known_of_a_box_is_left_out() -> None:
    document = describe(facts(cpu_cores=0, memory_bytes=0, disk_bytes=0, runtimes=[]), Dialect.BASELINE, {}, [])

    assert document.text() == (
        '{"architecture":"x64","executors":["remote-worker"],"operatingSystem":"linux",'
        '"runtimes":[],"labels":{},"capacity":{},"features":[]}'
    )


def test_the_same_box_gives_the_same_text_whatever_the_order() -> None:
    runtimes = [InstalledRuntime(name=name, version="1.0.0") for name in ("node", "bash", "python")]
    labels = {"b": "1", "2": "x", "A": "y", "10": "z"}

    first = describe(facts(runtimes=runtimes), Dialect.LATER, labels, ["b", "a"])
    second = describe(facts(runtimes=runtimes[::-1]), Dialect.LATER, dict(reversed(labels.items())), ["a", "b"])

    assert first.text() == second.text()
    assert first.digest() == second.digest()
    assert Capabilities.parse(first.text()) == first


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": ""},
        {"architecture": "X64"},
        {"architecture": "a" * 33},
        {"executors": []},
        {"executors": ["a", "a"]},
        {"executors": [f"e{number}" for number in range(17)]},
        {"executors": ["a" * 65]},
        {"operating_system": "Linux"},
        {"operating_system": "l" * 33},
        {"protocol_version": "1.0.0"},
        {"support_tier": "tier1"},
        {"architecture": "amd64", "protocol_version": "1.0.0", "support_tier": "candidate"},
        {"architecture": "x64", "protocol_version": "1.0.0", "support_tier": "tier1"},
        {"architecture": "amd64", "protocol_version": "1.0", "support_tier": "tier1"},
        {"runtimes": [InstalledRuntime(name=f"r{number}", version="1.0.0") for number in range(33)]},
        {"runtimes": [InstalledRuntime(name="r", version="1.0.0"), InstalledRuntime(name="r", version="2.0.0")]},
        {"labels": {f"k{number}": "v" for number in range(33)}},
        {"labels": {"": "v"}},
        {"labels": {"k" * 129: "v"}},
        {"labels": {"-k": "v"}},
        {"labels": {"k": ""}},
        {"labels": {"k": "v" * 257}},
        {"labels": {"k": "a\nb"}},
        {"features": ["a", "a"]},
        {"features": ["A"]},
        {"features": [f"f{number}" for number in range(33)]},
    ],
)
def test_a_document_beyond_its_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|belong together"):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_cores": 0},
        {"cpu_cores": 4097},
        {"memory_bytes": 0},
        {"disk_bytes": 2**53},
        {"gpu": [Gpu(vendor="nvidia")] * 9},
    ],
)
def test_a_capacity_beyond_its_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"capacity\."):
        Capacity(**changes)


@pytest.mark.parametrize("changes", [{"vendor": ""}, {"model": ""}, {"model": "m" * 129}, {"memory_bytes": 0}])
def test_a_gpu_beyond_its_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a gpu's"):
        Gpu(**{"vendor": "nvidia", **changes})


def test_the_largest_allowed_values_are_accepted() -> None:
    document = make(
        architecture="a" * 32,
        labels={f"k{number:03}" + "x" * 60: "é" * 100 for number in range(32)},
        capacity=Capacity(cpu_cores=4096, memory_bytes=2**53 - 1, disk_bytes=1, gpu=[Gpu(vendor="n", model="m" * 128)] * 8),
        features=[f"f{number}" for number in range(32)],
    )

    assert Capabilities.parse(document.text()) == document.canonical()


def test_a_document_above_16_kib_is_refused_with_the_remedy() -> None:
    document = make(labels={f"k{number}" + "x" * 100: "€" * 256 for number in range(32)})

    with pytest.raises(ValueError, match="use fewer or shorter labels"):
        document.text()
    with pytest.raises(ValueError, match="at most 16384 bytes"):
        Capabilities.parse(document.to_json().decode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"architecture":"x64"}',
        '{"architecture":"x64","executors":["remote-worker"],"more":1}',
        '{"executors":["remote-worker"],"architecture":"x64"}',
        '{"architecture": "x64","executors":["remote-worker"]}',
        '{"architecture":"x64","executors":["b","a"]}',
        '{"architecture":"x64","executors":["a"],"labels":{"b":"1","a":"2"}}',
        '{"architecture":"x64","executors":["a"],"labels":{"10":"1","2":"2"}}',
        '{"architecture":"x64","executors":["a"],"runtimes":[{"name":"b","version":"1.0.0"},{"name":"a","version":"1.0.0"}]}',
        '{"architecture":"x64","executors":["a"],"operatingSystem":null}',
    ],
)
def test_a_text_that_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="capabilities must be"):
        Capabilities.parse(text)


@pytest.mark.parametrize("version", ["1.0.0", "0.0.0", "1.2.3-rc.1+build.5", "24.14.0", "1.0.0-0a", "1.0.0--"])
def test_semantic_versions_are_accepted(version: str) -> None:
    assert check_version(version, "x") == version


@pytest.mark.parametrize(
    "version", ["", "1", "1.0", "01.0.0", "1.0.0-", "1.0.0-01", "1.0.0+", "v1.0.0", "1.0.0\n", "1.0." + "0" * 64]
)
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match="semantic version"):
        check_version(version, "x")


@given(
    labels=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,12}", fullmatch=True),
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
        max_size=8,
    ),
    dialect=st.sampled_from(Dialect),
)
def test_what_this_worker_sends_is_what_the_control_plane_would_write(labels: dict[str, str], dialect: Dialect) -> None:
    document = describe(facts(), dialect, labels, [])

    assert Capabilities.parse(document.text()) == document
    assert document.dialect is dialect
