"""Workers on other hosts than the broker's: tensors go from host to host, and nothing stays on any."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from adapters.host import host_of, this_host
from broker.client import BrokerError, RequestStream
from pipelines.graph import Pipeline
from tests.core.driver import line
from tests.wire.far import Rig, Worker, far_rig
from tests.wire.rig import Counter, eventually
from workers.engine import Job

FLOATS = 50_000
MADE = 6  #: chunks; at most five are brought ahead: one that the job reads, and the window


@pytest.fixture(autouse=True)
def pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends are in this process, which keeps what UCX opens; `tests/net` has processes for it."""
    monkeypatch.setattr("adapters.net.server.has_ucx", lambda: False)


class Doubler(Counter):
    """Hands on what it reads, twice as large."""

    def __init__(self, *, allowed: int | None = None) -> None:
        super().__init__(1 << 30, allowed=allowed)

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        self.jobs.append(job)
        (stream,) = job.inputs.values()
        async for item in stream:
            while self.yielded >= self._allowed:
                self._more.clear()
                await self._more.wait()
            self.yielded += 1
            yield {"n": item["n"], "data": item["data"] * 2}


class Climber(Counter):
    """Keeps a large state, and goes on from it."""

    resumes = True

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        self.jobs.append(job)
        state = job.resume_state or {"n": 0, "data": np.zeros(FLOATS, np.float32)}
        for n in range(state["n"], self.total):
            assert (state["data"] == n).all()
            while n >= self._allowed:
                self._more.clear()
                await self._more.wait()
            state = {"n": n + 1, "data": state["data"] + 1}
            yield {"n": n}
            await job.checkpoint(state)


async def submit(rig: Rig, **more: Any) -> RequestStream:
    given = {"request": [{"n": 0, "data": np.ones(FLOATS, np.float32)}]}
    return await rig.client.submit("line", outputs=["out"], given=given, **more)


@asynccontextmanager
async def all_made(
    folder: Path, pipeline: Pipeline
) -> AsyncIterator[tuple[Rig, Worker, Doubler, RequestStream]]:
    """A request of which `a` on "there" has made all, and `b` on "yonder" has handed nothing on yet."""
    async with far_rig(folder, pipeline) as rig:
        counter, doubler = Counter(MADE, floats=FLOATS), Doubler(allowed=0)
        a = await rig.add("there", "a", counter)
        await rig.add("yonder", "b", doubler)
        stream = await submit(rig)
        await eventually(lambda: counter.ended, "everything to be made")
        await eventually(lambda: not a.process.running, "its end to be sent")
        yield rig, a, doubler, stream


async def rest(stream: RequestStream, first: int = 0) -> list[int]:
    found = []
    async for _, payload in stream:
        assert (payload["data"] == 2 * payload["n"]).all()
        found.append(payload["n"])
    return found


async def test_tensors_cross_three_hosts_and_leave_nothing(tmp_path: Path) -> None:
    async with far_rig(tmp_path, line("a", "b")) as rig:
        await rig.add("there", "a", Counter(12, floats=FLOATS))
        await rig.add("yonder", "b", Doubler())
        async with await submit(rig) as stream:
            assert await rest(stream) == list(range(12))
        arenas = [worker.process.arena for worker in rig.workers.values()]
        await eventually(lambda: not any(arena.usage().blocks for arena in arenas), "all blocks to be freed")


async def test_a_dead_engines_chunks_are_read_from_its_host_and_then_removed_there(tmp_path: Path) -> None:
    async with all_made(tmp_path, line("a", "b", retry={"attempts": 2})) as (rig, a, doubler, stream):
        a.report_death()
        assert rig.hosts["there"].segments
        doubler.allow(MADE)
        async with stream:
            assert await rest(stream) == list(range(MADE))
        await eventually(lambda: not rig.hosts["there"].segments, "the dead engine's memory to be removed")
        rig.forget(a)
        await a.close_guardian()


async def test_a_host_whose_processes_all_died_serves_what_is_left_when_one_returns(
    tmp_path: Path,
) -> None:
    async with all_made(tmp_path, line("a", "b")) as (rig, a, doubler, stream):
        await a.vanish()
        rig.forget(a)
        doubler.allow(MADE)
        await rig.add("there", "a", Counter(1))
        async with stream:
            assert await rest(stream) == list(range(MADE))
        there = rig.hosts["there"]
        await eventually(lambda: not there.leftovers, "memory and files to be removed")


async def test_an_input_out_of_reach_is_an_honest_error_that_names_host_and_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_FETCH_S", "0.3")
    async with all_made(tmp_path, line("a", "b", retry={"attempts": 2})) as (rig, a, doubler, stream):
        await a.vanish()
        rig.forget(a)
        doubler.allow(MADE)
        with pytest.raises(BrokerError) as caught:
            await rest(stream)
        error = caught.value.error
        assert (error.type, error.status, error.stage, error.attempts) == ("unreachable", 503, "b", 2)
        assert "a -> b" in error.message
        assert this_host(rig.hosts["there"].shm) in error.message
        stream.done()
        assert (await rig.client.letters("drop", "all")) is not None
        rig.hosts["there"].lose()


@pytest.mark.parametrize("checkpoint", ["memory", "disk"])
async def test_what_a_host_says_is_gone_comes_from_its_copy_or_fails_as_lost(
    tmp_path: Path, checkpoint: Any
) -> None:
    """The host is back, and its memory is not what it was. That is nobody's fault, so it is no 500."""
    pipeline = line("a", "b", retry={"attempts": 2}).with_checkpoint(checkpoint)
    async with all_made(tmp_path, pipeline) as (rig, a, doubler, stream):
        await a.vanish()
        rig.forget(a)
        rig.hosts["there"].lose()
        await rig.add("there", "a", Counter(1))
        doubler.allow(MADE)
        if checkpoint == "disk":
            assert await rest(stream) == list(range(MADE))
            stream.done()
            return
        with pytest.raises(BrokerError) as caught:
            await rest(stream)
        error = caught.value.error
        assert (error.type, error.status, error.stage, error.attempts) == ("input_lost", 503, "b", 2)
        assert error.retry_after_s
        assert "a -> b" in error.message
        stream.done()
        assert (await rig.client.letters("drop", "all")) is not None


async def test_an_output_that_a_host_says_is_gone_is_lost_and_no_fault_of_the_stage(tmp_path: Path) -> None:
    async with far_rig(tmp_path, line("a")) as rig:
        a = await rig.add("there", "a", Counter(MADE, floats=FLOATS))
        stream = await submit(rig)
        assert (await anext(stream))[1]["n"] == 0
        await eventually(lambda: not a.process.running, "all to be made")
        await a.vanish()
        rig.forget(a)
        rig.hosts["there"].lose()
        await rig.add("there", "a", Counter(1))
        with pytest.raises(BrokerError) as caught:
            async for _ in stream:
                pass
        assert (caught.value.error.type, caught.value.error.status) == ("output_lost", 503)
        assert caught.value.error.retry_after_s


async def test_a_task_that_waits_for_a_silent_host_stops_at_once_when_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_FETCH_S", "600")  # by itself it would wait for so long
    async with all_made(tmp_path, line("a", "b")) as (rig, a, doubler, stream):
        await a.vanish()
        rig.forget(a)
        await eventually(lambda: doubler.jobs, "the job to wait for its inputs")
        doubler.allow(MADE)
        stream.abort()
        await eventually(lambda: not rig.workers["yonder/b"].process.running, "the task to end")
        rig.hosts["there"].lose()


async def test_a_stage_goes_on_from_a_checkpoint_on_another_host(tmp_path: Path) -> None:
    async with far_rig(tmp_path, line("a")) as rig:
        first, second = Climber(6, allowed=3), Climber(6)
        a = await rig.add("there", "a", first)
        stream = await submit(rig)
        for n in range(3):
            assert (await anext(stream))[1]["n"] == n
        await rig.add("yonder", "a", second)
        await eventually(lambda: a.process.arena.usage().blocks, "a checkpoint")
        a.report_death()
        async with stream:
            assert [payload["n"] async for _, payload in stream] == [3, 4, 5]
        assert second.jobs[0].resume_state is not None
        await eventually(lambda: not rig.hosts["there"].segments, "the dead engine's memory to be removed")
        rig.forget(a)
        await a.close_guardian()


async def test_a_durable_edge_keeps_files_on_its_own_host_until_the_request_is_over(
    tmp_path: Path,
) -> None:
    async with far_rig(tmp_path, line("a", "b").with_checkpoint("disk")) as rig:
        counter, doubler = Counter(3, floats=FLOATS), Doubler(allowed=0)
        await rig.add("there", "a", counter)
        await rig.add("yonder", "b", doubler)
        stream = await submit(rig, name="name0000")
        await eventually(lambda: counter.ended, "everything to be made")
        run = rig.client._lending.run
        await eventually(lambda: len(rig.hosts["there"].files) == 3, "three files")
        files = rig.hosts["there"].files
        assert all(file.startswith(f"chunks-{run}/name0000/") for file in files)
        assert {host_of(file.partition("/")[2]) for file in files} != {this_host(rig.hosts["there"].shm)}
        doubler.allow(3)
        async with stream:
            assert await rest(stream) == [0, 1, 2]
        await eventually(lambda: not (rig.hosts["there"].files or rig.hosts["yonder"].files), "files to go")


async def test_requests_go_on_when_the_broker_dies_and_workers_are_elsewhere(tmp_path: Path) -> None:
    async with far_rig(tmp_path, line("a", "b")) as rig:
        counter, doubler = Counter(8, floats=FLOATS, allowed=4), Doubler()
        await rig.add("there", "a", counter)
        await rig.add("yonder", "b", doubler)
        stream = await submit(rig)
        assert (await anext(stream))[1]["n"] == 0
        await rig.restart()
        counter.allow(8)
        async with stream:
            assert await rest(stream) == list(range(1, 8))


@pytest.mark.parametrize("checkpoint", ["memory", "disk"])
async def test_a_broker_that_was_stopped_finds_what_lies_elsewhere(tmp_path: Path, checkpoint: Any) -> None:
    async with far_rig(tmp_path, line("a", "b").with_checkpoint(checkpoint)) as rig:
        counter, doubler = Counter(4, floats=FLOATS), Doubler(allowed=0)
        a = await rig.add("there", "a", counter)
        b = await rig.add("yonder", "b", doubler)
        stream = await submit(rig, stored=True)
        await eventually(lambda: counter.ended and not a.process.running, "everything to be made")
        rig.broker.stop()
        for worker in (a, b):
            rig.forget(worker)
            await worker.vanish()
        rig.broker.start()
        await rig.add("there", "a", Counter(4, floats=FLOATS))
        await rig.add("yonder", "b", Doubler())
        assert await rest(stream) == list(range(4))
        stream.abort()
        there = rig.hosts["there"]
        await eventually(lambda: not there.leftovers, "memory and files to be removed")
