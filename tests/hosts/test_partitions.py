"""Hosts that are cut off and come back, and hosts whose processes all die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from broker.client import BrokerError, Client
from scripts.benchmarks.hosts import Cluster
from tests.hosts.rig import Song, document, running, sit_on, until

LEFT, RIGHT = 1, 2
WORKERS = {
    LEFT: ["line/tone", "line/mix", "kept/mix", "bare/tone"],
    RIGHT: ["line/tone", "lone/tone", "lone/mix", "kept/tone", "bare/mix"],
}
GIVEN_UP_S = 60.0  #: a worker loses its leases after 6 s of silence; later where the machine is busy


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker's host without workers, and two with half of them each; the right one is struck."""
    pipelines = [document("line"), document("lone"), document("kept"), document("bare", checkpoint="none")]
    with running(tmp_path_factory.mktemp("halves"), 3, pipelines, WORKERS) as made:
        yield made


@pytest.fixture
async def client(halves: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A caller on the broker's host. In the end the broker holds nothing for it, and no host keeps memory."""
    sit_on(halves.first, monkeypatch)
    halves.hosts[RIGHT].restore()  # which the test before would have done, had it not failed
    await until(lambda: all_there(halves))
    async with Client(halves.local) as connected:
        yield connected
    assert await asyncio.to_thread(halves.tables, GIVEN_UP_S) == {}
    assert await asyncio.to_thread(halves.memory, GIVEN_UP_S) == {}


def all_there(cluster: Cluster) -> bool:
    """Whether every stage has all its workers, on the hosts where they belong."""
    wanted = {(host, stage) for host, stages in WORKERS.items() for stage in stages}
    return all(host in {w.host for w in cluster.workers(stage)} for host, stage in wanted)


def hosts_of(cluster: Cluster, stage: str) -> set[int]:
    return {worker.host for worker in cluster.workers(stage)}


def idle(cluster: Cluster, stage: str) -> bool:
    """Whether the broker answers, and no worker of a stage has anything to do."""
    workers = cluster.workers(stage)
    return bool(workers) and not any(worker.running for worker in workers)


def slow(seconds: float) -> dict[str, Any]:
    """Parameters of a stage that makes a chunk in so many seconds."""
    return {"chunk_sleep_s": seconds}


async def test_a_short_cut_costs_nobody_an_attempt(halves: Cluster, client: Client) -> None:
    song = Song(client, "lone", 20, tone=slow(0.1))
    await song.at(3)
    halves.hosts[RIGHT].cut()
    await asyncio.sleep(1.0)  # of the six that it may be silent; a busy machine adds to them
    halves.hosts[RIGHT].restore()
    await song.whole()
    assert song.attempts == {"tone": 1, "mix": 1}


async def test_half_of_the_workers_are_cut_off_and_the_rest_go_on(halves: Cluster, client: Client) -> None:
    """What has workers and inputs elsewhere goes on with them; all else waits until the host is back."""
    pause = {"at": 6, "sleep_s": 7.0, "attempts": 1}  # so that no chunk is on its way when the link is cut
    songs = [Song(client, "line", 24, tone=slow(0.1) | pause) for _ in range(6)]
    lone = Song(client, "lone", 24, tone=slow(0.1) | pause)
    for song in (*songs, lone):
        await song.at(6)
    await until(lambda: {w.host for w in halves.workers("line/tone") if w.running} == {LEFT, RIGHT})
    halves.hosts[RIGHT].cut()
    await until(lambda: hosts_of(halves, "line/tone") == {LEFT}, GIVEN_UP_S)
    for song in songs:
        await song.whole()
    assert {song.attempts["tone"] for song in songs} == {1, 2}
    assert not lone.ended
    halves.hosts[RIGHT].restore()
    await lone.whole()
    assert lone.attempts == {"tone": 2, "mix": 2}
    await until(lambda: all_there(halves))


async def test_a_host_whose_processes_all_die_still_has_what_they_made(
    halves: Cluster, client: Client
) -> None:
    """Its new guardians serve the arenas of its dead engines. Where nothing is kept, the caller is told."""
    made = Song(client, "kept", 24, mix=slow(0.15))
    await made.at(1)
    await until(lambda: idle(halves, "kept/tone"))
    half = slow(0.1) | {"at": 12, "hang": True, "attempts": 1}  # so that it is not over when its host dies
    making = Song(client, "kept", 24, tone=half)
    bare = Song(client, "bare", 24, tone=half)
    for song in (made, making, bare):
        await song.at(4)
    halves.hosts[RIGHT].kill_all()
    for stage in WORKERS[RIGHT]:
        halves.worker(RIGHT, stage)
    await made.whole()
    assert made.attempts == {"tone": 1, "mix": 1}
    await making.whole()
    assert making.attempts == {"tone": 2, "mix": 1}
    with pytest.raises(BrokerError) as caught:
        await bare.whole()
    assert caught.value.error.type == "worker_died"
    assert caught.value.error.stage == "mix"
    assert len(bare.chunks) < 24
