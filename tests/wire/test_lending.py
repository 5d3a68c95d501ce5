"""What a client lends is taken back where it comes to nothing, and left where others need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from adapters.handle import BadPayload
from adapters.sweep import RunLock
from broker.lending import Lending
from broker.protocol import VERSION, Connected
from pipelines.graph import REQUEST, Edge, Pipeline, Stage
from scripts.leftovers import files_in

RUN = "5eed" * 4
NAME = "a-request"
BIG = {"x": np.arange(100_000)}
LASTING = Pipeline("line", {"out": "a"}, {"a": Stage("function")}, [Edge(REQUEST, "a", checkpoint="disk")])


@pytest.fixture
def shm(leaves_nothing: Path) -> Iterator[Path]:
    """The shared-memory folder, while a broker of the run lives."""
    with closing(RunLock(RUN)):
        yield leaves_nothing / "shm"


@pytest.mark.parametrize("pipeline", [None, LASTING], ids=["in memory", "on disk too"])
async def test_a_payload_that_cannot_travel_takes_back_those_before_it(
    shm: Path, tmp_path: Path, pipeline: Pipeline | None
) -> None:
    lending = Lending("api", None)
    lending.begin(Connected(VERSION, RUN, [], store=str(tmp_path / "store")))
    with pytest.raises(BadPayload, match=r"payload\.x"):
        await lending.pack({"request": [BIG, {"x": object()}]}, NAME, pipeline)
    assert files_in(tmp_path) in ([], ["store/name"])
    lending.leave()
    assert files_in(shm) == [f"omni-{RUN}-run"], "without a block in use the arena goes"


async def test_lent_blocks_stay_until_the_run_is_over(shm: Path) -> None:
    lending = Lending("api", None)
    lending.begin(Connected(VERSION, RUN, []))
    packed = await lending.pack({"request": [BIG]}, NAME, None)
    lending.begin(Connected(VERSION, RUN, []))  # the broker had given us up
    packed |= await lending.pack({"other": [BIG]}, NAME, None)
    places = {chunk.handles[0].block.place for chunks in packed.values() for chunk in chunks}
    lending.leave()
    assert set(files_in(shm)) == {*places, f"omni-{RUN}-run"}
    lending = Lending("api", None)
    lending.begin(Connected(VERSION, RUN, []))
    await lending.pack({"request": [BIG]}, NAME, None)
    (shm / f"omni-{RUN}-run").unlink()  # as when the last broker has ended
    lending.leave()
    assert files_in(shm) == []
