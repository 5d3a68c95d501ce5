"""What survives the loss of a host: chunks and checkpoints in Mooncake, which has them on others too."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from adapters.chunk import Payload
from broker.client import Client
from scripts.benchmarks.hosts import Cluster, Host, cluster
from scripts.benchmarks.lan import missing
from scripts.leftovers import files_in
from tests.adapters.moon import need
from tests.hosts.rig import PATIENCE_S, START_S, Song, document, sit_on, until
from tests.hosts.test_partitions import idle
from tests.process.steps_engine import HANGS_AT, STEPS, advance, begin

MASTER_PORT, MEMORY_PORT, METRICS_PORT = 50051, 50052, 9003
CLIENT_TTL_S = 5  #: silence after which Mooncake takes a host for lost
HOME, LOST, OTHER = 0, 1, 2
SEED = 7
ROOT = Path(__file__).parents[2]
STEPS_DOCUMENT = {
    "name": "steps",
    "outputs": {"text": "a"},
    "stages": {"a": {"engine": "tests.process.steps_engine:StepsEngine"}},
    "edges": [{"from": "request", "to": "a", "checkpoint": "disk"}],
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts that give Mooncake memory. The broker's has its master, and the ends of all lines."""
    need()
    if why := missing():
        pytest.skip(why)
    folder, options = tmp_path_factory.mktemp("three"), []
    for pipeline in (
        document("kept", checkpoint="disk"),
        document("moon", transport="mooncake"),
        STEPS_DOCUMENT,
    ):
        file = folder / f"{pipeline['name']}.yaml"
        file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
        options += ["--pipeline", str(file)]
    with cluster(3, {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}) as made:
        master = f"{made.first.address}:{MASTER_PORT}"
        made.first.popen("mooncake.cli", f"--rpc_port={MASTER_PORT}", f"--client_ttl={CLIENT_TTL_S}")
        for port in (MASTER_PORT, METRICS_PORT):
            made.until(lambda port=port: listens(made.first, port), START_S)
        for host in made.hosts:
            give_memory(host, master)
        made.until(lambda: len(ask(made, "get_all_segments").split()) == len(made.hosts), START_S)
        made.start("--store", "mooncake", "--mooncake-master", master, *options)
        made.place({HOME: ["kept/mix", "moon/mix"], LOST: ["kept/tone", "moon/tone", "steps/a"]})
        yield made
        assert ask(made, "get_all_keys") == "", "all is removed with its request"
        assert sum(made.stop()) == 0, made.log
        assert "Traceback" not in made.log, made.log


@pytest.fixture
async def client(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A caller on the broker's host. In the end the broker holds nothing for it."""
    sit_on(three.first, monkeypatch)
    async with Client(three.local) as connected:
        yield connected
    assert await asyncio.to_thread(three.tables, 60.0) == {}


def give_memory(host: Host, master: str) -> None:
    where = (f"--host={host.address}", f"--port={MEMORY_PORT}", f"--master_server_address={master}")
    host.popen("mooncake.cli_client", *where, "--metadata_server=P2PHANDSHAKE", "--global_segment_size=128MB")


def listens(host: Host, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host.address, port)) == 0


def ask(made: Cluster, what: str) -> str:
    """What Mooncake's master says, a line for each object or host."""
    url = f"http://{made.first.address}:{METRICS_PORT}/{what}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def lose(host: Host) -> None:
    """Its power is cut: nobody gets as much as a reset from it, and its memory and disk are gone."""
    host.cut()
    host.kill_all()
    for folder in (host.shm_dir, host.run_dir, host.state_dir):
        for file in files_in(folder):
            (folder / file).unlink()


async def test_an_edge_over_mooncake_needs_no_shared_memory(three: Cluster, client: Client) -> None:
    song = Song(client, "moon", 8)
    await song.whole()
    assert song.attempts == {"tone": 1, "mix": 1}
    await until(lambda: three.workers("moon/tone"))
    assert not [name for name in three.hosts[LOST].segments() if not name.endswith("-run")]
    await until(lambda: ask(three, "get_all_keys") == "")


async def test_what_a_lost_host_has_made_is_read_elsewhere_and_its_stage_resumes(
    three: Cluster, client: Client
) -> None:
    """`tone` has finished when its host is lost, and `mix` has a few of its chunks; `steps` hangs there."""
    song = Song(client, "kept", 24, mix={"chunk_sleep_s": 0.15})
    climb = Climb(client)
    await song.at(4)
    await until(lambda: len(climb.payloads) == HANGS_AT or climb.reading.done())
    await until(lambda: idle(three, "kept/tone"))
    three.worker(OTHER, "steps/a")
    await until(lambda: len(three.workers("steps/a")) == 2)
    lose(three.hosts[LOST])
    await song.whole()
    assert song.attempts == {"tone": 1, "mix": 1}
    await climb.whole()
    assert [payload["first"] for payload in climb.payloads] == [0] * HANGS_AT + [HANGS_AT] * (
        STEPS - HANGS_AT
    )


class Climb:
    """A request for steps, the first attempt of which hangs at one of them."""

    def __init__(self, client: Client) -> None:
        self.payloads: list[Payload] = []
        self._client = client
        self.reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        given: dict[str, list[Payload]] = {"request": [{"text": "go"}]}
        params: dict[str, Any] = {"a": {"hangs": True}}
        opening = self._client.submit("steps", outputs=["text"], given=given, params=params, seed=SEED)
        async with await opening as stream:
            async for _, payload in stream:
                self.payloads.append({**payload, "latents": np.array(payload["latents"])})
                del payload

    async def whole(self) -> None:
        """Waits for the end: all steps are there, as a life without a death would have given them."""
        async with asyncio.timeout(PATIENCE_S):
            await self.reading
        state = begin(SEED)
        for step, payload in enumerate(self.payloads):
            state = advance(state)
            assert payload["step"] == step
            assert payload["codes"] == state["codes"]
            assert np.array_equal(payload["latents"], state["latents"])
        assert len(self.payloads) == STEPS
