"""A far host for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.rig import FarHost, far_host


@pytest.fixture
def far(leaves_nothing: Path) -> Iterator[FarHost]:
    """A host with nothing on it."""
    with far_host(leaves_nothing) as host:
        yield host
