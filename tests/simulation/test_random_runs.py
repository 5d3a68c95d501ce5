"""The core under random life: nothing lost, nothing doubled, nothing left."""

from __future__ import annotations

import os

import pytest

from tests.simulation.world import World

FIRST, COUNT = int(os.environ.get("SIM_FIRST", "0")), int(os.environ.get("SIM_COUNT", "300"))


@pytest.mark.parametrize("start", range(FIRST, FIRST + COUNT, 50))
def test_requests_survive_deaths_cancels_and_delays(start: int) -> None:
    for seed in range(start, min(start + 50, FIRST + COUNT)):
        try:
            World(seed).run(400)
        except Exception as error:
            raise AssertionError(f"seed {seed} fails: {error}") from error
