"""Rows that come over a streaming edge, and frames of several codes."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.chunk import Payload
from tests.engines.ar.talking import HIDDEN, expected
from tests.engines.helpers import collect, stage, started, until
from workers.engine import ItemError, Job, Stream
from workers.engines.ar.engine import ROWS_AHEAD, ArEngine
from workers.engines.ar.family import Layout, Prompt
from workers.engines.ar.runner import Runner
from workers.engines.ar.sequence import Choice, Sequence


def talkers(wait_ms: int = 0, **options: Any) -> AbstractAsyncContextManager[ArEngine]:
    settings: dict[str, Any] = {
        "model": ".",
        "batch": {"wait_ms": wait_ms},
        "resources": {"threads": 1},
        "options": {
            "family": "tests.engines.ar.talking:Talker",
            "kv_cache_gib": 0.005,
            "block_size": 8,
            **options,
        },
    }
    return started(ArEngine(stage("ar", **settings), device="cpu"))


def start_of(length: int) -> torch.Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(length))


def rows_of(seed: int, count: int = 12) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + seed))


def talk(edge: Stream, *, seed: int = 1, resumed: list[Payload] | None = None, **params: Any) -> Job:
    wishes = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **params}
    return Job("test", {"thinker": edge}, wishes, seed, resumed=resumed)


def whole(length: int, count: int = 12) -> Stream:
    rows = rows_of(length, count)
    pieces = [{"rows": rows[:1]}, {"rows": rows[1:7]}, {"rows": rows[7:]}]
    return Stream([{"start": start_of(length)}, *pieces], closed=True)


def codes_of(payloads: list[Payload]) -> list[list[int]]:
    return [frame for payload in payloads for frame in payload["codes"]]


async def test_frames_equal_those_computed_without_engine_or_cache() -> None:
    async with talkers() as engine:
        answers = await asyncio.gather(*(collect(engine, talk(whole(n))) for n in (3, 9, 30)))
    for length, answer in zip((3, 9, 30), answers, strict=True):
        assert codes_of(answer) == expected(start_of(length), rows_of(length), 20)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_frames_go_on_after_a_break_and_after_lost_memory(temperature: float) -> None:
    async with talkers() as engine:
        answer = await collect(engine, talk(whole(9), temperature=temperature))
        for cut in (1, 5, 19, 20):
            work = talk(whole(9), temperature=temperature, resumed=answer[:cut])
            assert codes_of(answer[:cut] + await collect(engine, work)) == codes_of(answer)
    block = 2 * 2 * 2 * 8 * 8 * 4
    async with talkers(kv_cache_gib=9 * block / 2**30) as engine:  # 72 rows for 3 x 29
        works = [talk(whole(9), temperature=temperature) for _ in range(3)]
        answers = await asyncio.gather(*(collect(engine, work) for work in works))
        assert engine.thread.scheduler.preemptions > 0
    assert [codes_of(each) for each in answers] == [codes_of(answer)] * 3


async def test_a_job_that_waits_for_a_row_holds_nobody_up() -> None:
    async with talkers() as engine:
        edge = Stream([{"start": start_of(5)}, {"rows": rows_of(5)[:2]}])
        slow: list[Payload] = []
        waiting = asyncio.ensure_future(collect(engine, talk(edge), slow))
        await until(lambda: len(slow) == 3)  # the prompt's token, and one for each row
        assert codes_of(await collect(engine, talk(whole(9)))) == expected(start_of(9), rows_of(9), 20)
        assert len(slow) == 3
        edge.feed([{"rows": rows_of(5)[2:3]}], closed=False)
        await until(lambda: len(slow) == 4)
        edge.feed([{"rows": rows_of(5)[3:]}], closed=True)
        await waiting
    assert codes_of(slow) == expected(start_of(5), rows_of(5), 20)


async def test_a_step_waits_for_company_as_long_as_the_stage_says() -> None:
    async with talkers(wait_ms=300) as engine:
        edges = [Stream([{"start": start_of(n)}]) for n in (5, 9)]
        answers = [engine.run(talk(edge, max_tokens=2)) for edge in edges]
        for answer in answers:
            await anext(answer)
        assert engine.thread._company_s == 0.3
        engine.thread._company_s = 600.0  # longer than we may be held up between the two rows
        sizes: list[int] = []
        step = engine.thread.runner.step
        engine.thread.runner.step = lambda pieces: (sizes.append(len(pieces)), step(pieces))[1]  # type: ignore[method-assign]
        last = [asyncio.ensure_future(anext(answer)) for answer in answers]
        edges[0].feed([{"rows": rows_of(5)}], closed=True)
        await until(lambda: any(one.rows for one in engine.thread.scheduler.running))
        edges[1].feed([{"rows": rows_of(9)}], closed=True)
        ended = await asyncio.gather(*last)
        assert [payload["finish_reason"] for payload in ended] == ["length"] * 2
    assert sizes == [2]


async def test_a_step_waits_for_no_caller_that_reads_slowly() -> None:
    async with talkers(wait_ms=10_000) as engine:
        slow = engine.run(talk(Stream([{"start": start_of(5)}, {"rows": rows_of(5, 1)}], closed=True)))
        await anext(slow)
        await until(lambda: not engine.thread.scheduler.running[0].wanted)
        async with asyncio.timeout(60):
            answer = await collect(engine, talk(whole(9)))
        await slow.aclose()
    assert codes_of(answer) == expected(start_of(9), rows_of(9), 20)


def test_rows_of_another_stage_and_the_models_own_share_a_step_on_a_device() -> None:
    """The first lie on the CPU, the others (an answer's end, and what follows it) with the model."""
    device = torch.device("meta")  # in a GPU's place: torch mixes it with the CPU as little
    runner = Runner.__new__(Runner)
    runner.device = device
    runner.model = SimpleNamespace(layout=Layout(1, 1, 1, torch.bfloat16), embed=lambda codes, rows: rows)  # type: ignore[assignment]
    prompt = Prompt([], torch.zeros(2, HIDDEN))
    one, other = (Sequence("", prompt, Choice(1), 9, written=[[1]], streamed=True) for _ in "12")
    one.rows, other.rest = [torch.zeros(HIDDEN)], torch.zeros(HIDDEN, device=device)
    rows = runner._embed_generated([(one, 0), (other, 0)])
    assert (rows.device, rows.dtype, rows.shape) == (device, torch.bfloat16, (2, HIDDEN))


async def test_rows_are_not_read_far_ahead() -> None:
    taken = 0

    def take(count: int) -> None:
        nonlocal taken
        taken += count

    rows = [{"rows": row[None]} for row in rows_of(4, 150)]
    edge = Stream([{"start": start_of(4)}, *rows], closed=True, taken=take)
    async with talkers() as engine:
        answer = engine.run(talk(edge, max_tokens=150))
        await anext(answer)
        await until(lambda: engine.thread.scheduler.running[0].made >= 8)
        await asyncio.sleep(0)
        assert taken <= 1 + ROWS_AHEAD + 1 + 8
        assert len([payload async for payload in answer]) == 149


async def test_a_failing_edge_or_start_fails_its_own_job() -> None:
    async with talkers() as engine:
        good = asyncio.ensure_future(collect(engine, talk(whole(9))))
        broken = Stream([{"start": start_of(5)}, {"rows": rows_of(5)[:2]}, {"error": "cut"}], closed=True)
        bad: list[Payload] = []
        with pytest.raises(ItemError, match="cut"):
            await collect(engine, talk(broken), bad)
        narrow = Stream([{"start": start_of(5)[:, :7]}], closed=True)
        with pytest.raises(Exception, match=r"size|shape|dimension"):
            await collect(engine, talk(narrow))
        with pytest.raises(ItemError, match="no start"):
            await collect(engine, talk(Stream([{}], closed=True)))
        assert codes_of(await good) == expected(start_of(9), rows_of(9), 20)
        assert engine.thread.scheduler.running == []
        await until(lambda: engine.thread.scheduler.blocks.free == engine.thread.scheduler.blocks.total)


async def test_a_stop_code_ends_it_and_makes_no_frame() -> None:
    async with talkers() as engine:
        frames = expected(start_of(9), rows_of(9), 20)
        stop = frames[4][0]
        engine.thread.runner._stops = frozenset([stop])
        answer = await collect(engine, talk(whole(9), ignore_eos=False))
        first = [frame[0] for frame in frames].index(stop)
        assert codes_of(answer) == frames[:first]
        assert answer[-1]["finish_reason"] == "stop"
