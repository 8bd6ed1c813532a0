"""The durable handle: canonical text, and what its place alone decides."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlworker.domain.canonical import b64u
from qlworker.domain.identity import DurableHandle, Place, Presence, ProcessId, compare_place

HERE = Place(host_id="host", boot_id="boot-1", pid_namespace=11, time_namespace=12)
HANDLE = DurableHandle.of("handle", HERE, ProcessId(100, "5"), ProcessId(101, "6"))
UPSTREAM = DurableHandle(v=1, h="handle", b="boot-1", p=100, g=100, s="5")


@pytest.mark.parametrize("handle", [HANDLE, UPSTREAM])
def test_a_handle_is_its_text(handle: DurableHandle) -> None:
    text = handle.text()

    assert text.startswith("ql3lp1.")
    assert len(text) <= 512
    assert DurableHandle.parse(text) == handle


@given(st.integers(1, 2**31 - 1), st.integers(1, 10**31), st.text("abcdef0123456789-", min_size=1, max_size=64))
def test_every_handle_survives_its_text(pid: int, ticks: int, boot: str) -> None:
    place = Place(host_id="h" * 32, boot_id=boot, pid_namespace=2**32 - 1, time_namespace=2**32 - 1)
    handle = DurableHandle.of("0" * 36, place, ProcessId(pid, str(ticks)), ProcessId(pid, str(ticks)))

    assert DurableHandle.parse(handle.text()) == handle


def raw(text: bytes) -> str:
    return "ql3lp1." + b64u(text)


@pytest.mark.req("R202", "R281")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "ql3lp1.",
        "ql3lp2." + b64u(b"{}"),
        UPSTREAM.text() + "=",
        UPSTREAM.text().replace("ql3lp1.", "ql3lp1. "),
        raw(b"{}"),
        raw(b"[]"),
        raw(b"\xff\xff"),
        raw(b'{"v":1,"h":"handle","b":"boot-1","p":100,"g":100,"s":"5" }'),
        raw(b'{"h":"handle","v":1,"b":"boot-1","p":100,"g":100,"s":"5"}'),
        raw(b'{"v":1,"h":"handle","b":"boot-1","p":0,"g":100,"s":"5"}'),
        raw(b'{"v":1,"h":"handle","b":"boot-1","p":100,"g":100,"s":"05"}'),
        raw(b'{"v":1,"h":"handle","b":"boot-1","p":100,"g":100,"s":5}'),
        raw(b'{"v":1,"h":"handle","b":"boot 1","p":100,"g":100,"s":"5"}'),
        raw(b'{"v":1,"h":"","b":"boot-1","p":100,"g":100,"s":"5"}'),
        raw(b'{"v":2,"h":"handle","b":"boot-1","p":100,"g":100,"s":"5"}'),
        raw(b'{"v":1,"h":"handle","b":"boot-1","p":100,"g":100,"s":"5","n":1}'),
        "ql3lp1." + "A" * 600,
    ],
)
def test_what_is_not_exactly_a_handle_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        DurableHandle.parse(text)


@pytest.mark.req("R202", "R218", "R219")
@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, None),
        ({"host_id": "other"}, Presence.MISMATCH),
        ({"boot_id": "boot-2"}, Presence.OTHER_BOOT),
        ({"host_id": "other", "boot_id": "boot-2"}, Presence.MISMATCH),
        ({"pid_namespace": 1}, Presence.MISMATCH),
        ({"time_namespace": 1}, Presence.MISMATCH),
        ({"boot_id": "boot-2", "pid_namespace": 1}, Presence.OTHER_BOOT),
    ],
)
def test_a_place_alone_proves_another_boot_and_distrusts_another_host(
    change: dict[str, object], expected: Presence | None
) -> None:
    assert compare_place(HANDLE, msgspec.structs.replace(HERE, **change)) is expected


def test_an_upstream_handle_knows_its_boot_only() -> None:
    assert compare_place(UPSTREAM, msgspec.structs.replace(HERE, host_id="other", pid_namespace=9)) is None
    assert compare_place(UPSTREAM, msgspec.structs.replace(HERE, boot_id="boot-2")) is Presence.OTHER_BOOT
    assert UPSTREAM.command is None
    assert HANDLE.command == ProcessId(101, "6")
    assert HANDLE.launcher == ProcessId(100, "5")
