"""The broker's machine goes down, and Mooncake, on others, does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from adapters.chunk import Payload
from scripts.leftovers import files_in
from tests.adapters.moon import Moon, moon
from tests.house import House
from tests.process.steps_engine import HANGS_AT
from tests.process.test_checkpoints import (
    assert_undisturbed,
    kept,
    steps,
    submit,
    the_rest,
)

NAME = "in-mooncake-please"


def copies(made: Moon) -> list[str]:
    """What of the request lies in Mooncake, as the broker knows it."""
    return [key for key in made.stored() if f"/{NAME}/mc" in key]


async def test_what_was_open_goes_on_from_mooncake_and_is_removed_at_its_end(
    house: Callable[..., House], tmp_path: Path
) -> None:
    with moon(1) as made:
        options = ("--checkpoint", "disk", "--store", "mooncake", "--mooncake-master", made.address)
        home = steps(house, tmp_path, *options, "--mooncake-replicas", "1")
        given: list[Payload] = []
        async with home.client() as client:
            stream = await submit(client, name=NAME, stored=True, hangs=True)
            while len(given) < HANGS_AT:
                given.append(kept((await anext(stream))[1]))
            await asyncio.to_thread(home.until, lambda: HANGS_AT + 2 <= len(copies(made)) <= HANGS_AT + 3)
            home.loses_power()
        assert files_in(home.state_dir / "chunks") == []
        home.start("--pipeline", str(tmp_path / "pipeline.yaml"), *options, "--mooncake-replicas", "1")
        assert_undisturbed(given + await the_rest(home, NAME))
        await asyncio.to_thread(home.until, lambda: made.stored() == [])
