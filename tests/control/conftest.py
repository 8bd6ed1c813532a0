"""The control plane under test, checked for its invariants after every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.fixtures import Plane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """A control plane in a temporary directory. Versions, sequences and dedupe keys must agree at the end."""
    plane = Plane(tmp_path)
    try:
        yield plane
        plane.check_invariants()
    finally:
        plane.close()
