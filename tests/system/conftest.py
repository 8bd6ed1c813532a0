"""One control plane per test process; every test adds a worker of its own to it."""

from collections.abc import Iterator

import pytest

from .world import Box, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    world.start()
    yield world
    world.stop()


@pytest.fixture
def box(world: World) -> Box:
    return world.add_worker()
