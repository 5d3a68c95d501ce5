"""Memory is bounded, time is shared, and what is wrong with one job stays with it."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import weakref
from typing import Any

import pytest
import torch

from tests.engines.ar.asks import PROMPTS, ask, tokens_of
from tests.engines.ar.conftest import Serve
from tests.engines.helpers import collect, until
from workers.engine import ItemError
from workers.engines.ar.blocks import Blocks
from workers.engines.ar.cpu import Threads
from workers.engines.ar.family import Prompt, Step
from workers.engines.ar.schedule import Scheduler
from workers.engines.ar.sequence import AHEAD, Choice, Sequence

BLOCK = 2 * 3 * 2 * 8 * 8 * 4  # bytes of a block of 8 rows of the tiny models
LONG = {"tokens": 200}
CORES = len(os.sched_getaffinity(0))


async def test_the_memory_is_sized_once_and_never_grows(serve: Serve) -> None:
    async with serve(kv_cache_gib=50 * BLOCK / 2**30) as engine:
        pages = engine.thread.runner.pages
        memory = (pages.keys.data_ptr(), pages.values.data_ptr())
        assert pages.keys.nbytes + pages.values.nbytes == 51 * BLOCK  # one is for rows of nobody
        await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in PROMPTS * 2))
        assert (pages.keys.data_ptr(), pages.values.data_ptr()) == memory
        assert engine.thread.scheduler.blocks.free == 50


@pytest.mark.parametrize(
    ("options", "context"),
    [({}, 512), ({"max_model_len": 100}, 100), ({"kv_cache_gib": 11 * BLOCK / 2**30}, 88)],
)
async def test_a_job_that_can_never_fit_is_refused_with_the_numbers(
    serve: Serve, options: dict[str, Any], context: int
) -> None:
    async with serve(**options) as engine:
        with pytest.raises(ItemError, match=rf"{context} tokens.*context of {context}") as caught:
            await collect(engine, ask("a" * context))
        assert (caught.value.status, caught.value.param) == (400, "messages")
        last = await collect(engine, ask("a" * (context - 1), tokens=5))
        assert len(tokens_of(last)) == 1
        assert last[-1]["finish_reason"] == "length"
        with pytest.raises(ItemError, match="min_tokens"):
            await collect(engine, ask("a" * (context - 3), tokens=9, min_tokens=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_gib": 1e-9}, "kv_cache_gib"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 17}, "max_num_batched_tokens"),
        ({"hidden_layers": [4]}, "hidden_layers"),
        ({"family": "workers.engines.ar.text:Nothing"}, "family"),
        ({"family": "workers.engine:Job"}, "family"),
    ],
)
async def test_settings_that_cannot_work_end_the_start(
    serve: Serve, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        async with serve(**options):
            pass


@pytest.mark.parametrize(
    "params", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": "many"}, {"stop": [""]}, {"top_k": 1.5}]
)
async def test_bad_parameters_are_refused_by_name(serve: Serve, params: dict[str, Any]) -> None:
    async with serve() as engine:
        with pytest.raises(ItemError) as caught:
            await collect(engine, ask("Hi", **params))
        assert caught.value.status == 400
        assert str(caught.value.param).startswith(*params)


async def test_the_options_for_texts_have_an_effect(serve: Serve) -> None:
    async with serve(max_tokens=3, system_prompt="Be brief.", dtype="bfloat16") as engine:
        assert engine.thread.runner.pages.keys.dtype == torch.bfloat16
        work = ask("")
        work.params.pop("max_tokens")
        talk = {"messages": [{"role": "user", "content": "Hi"}]}
        work.inputs["request"].feed([talk], closed=True)  # type: ignore[attr-defined]
        answer = await collect(engine, work)
    assert len(tokens_of(answer)) == 3
    spoken = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert answer[-1]["prompt_tokens"] == len(spoken) - 3 * len("|start|>") - 2 * len("|end|>")


async def test_a_stage_says_how_tokens_are_chosen_where_requests_do_not(serve: Serve) -> None:
    async with serve(sampling={"temperature": 0, "repetition_penalty": 1.4}) as engine:
        said = await collect(engine, ask(PROMPTS[1], temperature=0, repetition_penalty=1.4))
        other = await collect(engine, ask(PROMPTS[1], temperature=0, repetition_penalty=1.0))
        silent = ask(PROMPTS[1])
        del silent.params["temperature"]
        assert tokens_of(await collect(engine, silent)) == tokens_of(said) != tokens_of(other)


async def test_leaving_frees_the_memory_within_a_step(serve: Serve) -> None:
    async with serve() as engine:
        scheduler = engine.thread.scheduler
        left = engine.run(ask(PROMPTS[7], **LONG))
        await anext(left)
        cancelled = asyncio.ensure_future(collect(engine, ask(PROMPTS[6], **LONG)))
        await until(lambda: len(scheduler.running) == 2)
        await left.aclose()
        cancelled.cancel()
        await until(lambda: scheduler.blocks.free == scheduler.blocks.total)
        assert scheduler.running == scheduler.waiting == []


async def test_a_job_whose_payloads_nobody_takes_stops_and_goes_on(serve: Serve) -> None:
    async with serve() as engine:
        whole = await collect(engine, ask(PROMPTS[2], tokens=60))
        slow = engine.run(ask(PROMPTS[2], tokens=60))
        taken = [await anext(slow)]
        sequence = engine.thread.scheduler.running[0]
        await until(lambda: not sequence.ready)
        await collect(engine, ask(PROMPTS[1], tokens=60))
        assert sequence.made - sequence.taken == AHEAD
        assert sequence.sink.qsize() < AHEAD
        taken += [payload async for payload in slow]
    assert tokens_of(taken) == tokens_of(whole)


async def test_a_job_with_nan_fails_by_name_and_leaves_nothing_behind(serve: Serve) -> None:
    async with serve() as engine:
        model = engine.model
        good = await collect(engine, ask(PROMPTS[4]))
        embed = model.embed
        exclamation = model._prompts.encode({"prompt": "!"}, {})[0]

        def poisoned(codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
            return embed(codes, rows).masked_fill(codes == exclamation, torch.nan)

        model.embed = poisoned  # type: ignore[method-assign]
        bad = asyncio.ensure_future(collect(engine, ask("!" * 50)))
        mates = [asyncio.ensure_future(collect(engine, ask(PROMPTS[4]))) for _ in range(3)]
        with pytest.raises(ItemError, match="token 0 are not finite"):
            await bad
        assert [tokens_of(await mate) for mate in mates] == [tokens_of(good)] * 3
        assert not engine.thread.runner.pages.keys.isnan().any()
        assert tokens_of(await collect(engine, ask(PROMPTS[4]))) == tokens_of(good)


async def test_nan_of_a_prompt_that_is_still_read_reaches_no_other_job(serve: Serve) -> None:
    """A job alone with it reads all blocks as they lie; one that comes later gets its blocks."""
    async with serve(max_num_batched_tokens=16) as engine:
        model, scheduler = engine.model, engine.thread.scheduler
        good = tokens_of(await collect(engine, ask(PROMPTS[4], tokens=60)))
        embed = model.embed
        exclamation = model._prompts.encode({"prompt": "!"}, {})[0]
        model.embed = lambda codes, rows: embed(codes, rows).masked_fill(codes == exclamation, torch.nan)  # type: ignore[method-assign]
        first = engine.run(ask(PROMPTS[4], tokens=60))
        mate = [await anext(first)]
        bad = asyncio.ensure_future(collect(engine, ask("!" * 150)))
        mate += [payload async for payload in first]
        assert tokens_of(mate) == good
        with pytest.raises(ItemError, match="not finite"):
            await bad
        reached, go, step = threading.Event(), threading.Event(), engine.thread.runner.step

        def halting(pieces: Any) -> Any:
            if not go.is_set() and any(one.computed > 100 for one in scheduler.running):
                reached.set()
                go.wait(60)
            return step(pieces)

        engine.thread.runner.step = halting  # type: ignore[method-assign]
        left = asyncio.ensure_future(collect(engine, ask("!" * 400)))
        await until(reached.is_set)
        left.cancel()
        await asyncio.wait([left])
        go.set()
        await until(lambda: not scheduler.running)
        assert tokens_of(await collect(engine, ask(PROMPTS[4], tokens=60))) == good


async def test_a_job_that_is_over_is_held_by_nobody(serve: Serve) -> None:
    """It has rows that lie in other processes' memory, which they could not use again."""
    async with serve() as engine:
        work = asyncio.ensure_future(collect(engine, ask(PROMPTS[2])))
        await until(lambda: bool(engine.thread.scheduler.running))
        sequence = weakref.ref(engine.thread.scheduler.running[0])
        await work
        del work
        await until(lambda: sequence() is None)


async def test_an_answer_begun_where_there_was_more_memory_fails_and_holds_nobody_up(serve: Serve) -> None:
    async with serve() as engine:
        begun = [payload async for payload in engine.run(ask("a" * 20, tokens=60))][:-1]
    assert len(tokens_of(begun)) > 44
    async with serve(kv_cache_gib=8 * BLOCK / 2**30) as engine:
        with pytest.raises(ItemError, match="more memory") as caught:
            async with asyncio.timeout(60):
                await collect(engine, ask("a" * 20, tokens=60, resumed=begun))
        assert caught.value.status >= 500  # another worker may take it
        assert len(tokens_of(await collect(engine, ask("b" * 20, tokens=5)))) == 5


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 5e-324])
async def test_the_smallest_temperatures_are_greedy(serve: Serve, temperature: float) -> None:
    async with serve() as engine:
        greedy = await collect(engine, ask(PROMPTS[1]))
        assert tokens_of(await collect(engine, ask(PROMPTS[1], temperature=temperature))) == tokens_of(greedy)


async def test_the_smallest_repetition_penalty_draws_what_was_said(serve: Serve) -> None:
    async with serve() as engine:
        said = await collect(engine, ask(PROMPTS[1], temperature=1, repetition_penalty=1e-300))
        known = {*engine.model._prompts.encode({"prompt": PROMPTS[1]}, {})}
        assert {*tokens_of(said)} <= known


async def test_an_output_that_raises_fails_its_own_job(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.engines.ar.text import TextOutput

    push = TextOutput.push

    def broken(self: TextOutput, step: Step) -> Any:
        if self.answer.count == 3 and self.answer._prompt_tokens == len(PROMPTS[2]):
            raise RuntimeError("no")
        return push(self, step)

    async with serve() as engine:
        whole = await collect(engine, ask(PROMPTS[1]))
        monkeypatch.setattr(TextOutput, "push", broken)
        bad = asyncio.ensure_future(collect(engine, ask(PROMPTS[2])))
        assert tokens_of(await collect(engine, ask(PROMPTS[1]))) == tokens_of(whole)
        with pytest.raises(RuntimeError, match="no"):
            await bad
        await until(lambda: engine.thread.scheduler.running == [])


@pytest.mark.parametrize("seed", range(60))
def test_every_job_ends_whatever_comes_goes_and_waits(seed: int) -> None:
    """The scheduler by itself, against random lives; nothing is lost, doubled or starved."""
    rng = random.Random(seed)
    blocks = Blocks(rng.randint(4, 40), rng.choice([1, 3, 8]))
    scheduler = Scheduler(blocks, rng.randint(1, 6), rng.randint(6, 30))
    rows = blocks.total * blocks.size
    left: list[Sequence] = []
    for _ in range(rng.randint(1, 12)):
        prompt = rng.randint(1, max(1, min(rows - 1, 60)))
        limit = rng.randint(1, min(rows - prompt, 40)) if rows > prompt else 1
        left.append(Sequence("", Prompt([0] * prompt), Choice(0), limit, streamed=rng.random() < 0.3))
    for sequence in left:
        scheduler.add(sequence)
    for _ in range(20_000):
        if not left:
            break
        for sequence in left:
            sequence.taken = sequence.made if rng.random() < 0.5 else sequence.taken
            if sequence.streamed and rng.random() < 0.5:
                sequence.rows.append(torch.zeros(1))
        if rng.random() < 0.01:
            scheduler.remove(left.pop(rng.randrange(len(left))))
        pieces = scheduler.plan()
        assert sum(piece.stop - piece.start for piece in pieces) <= 30
        assert len({piece.sequence for piece in pieces}) == len(pieces)
        owned = [block for one in scheduler.running for block in one.blocks]
        assert len(set(owned)) == len(owned) == blocks.total - blocks.free
        for piece in pieces:
            one = piece.sequence
            assert piece.start == one.computed < piece.stop <= len(one.blocks) * blocks.size
            one.computed = piece.stop
            if piece.samples:
                one.codes.append([0])
                one.made += 1
                if len(one.codes) == one.limit:
                    scheduler.remove(one)
                    left.remove(one)
    assert left == []
    assert blocks.free == blocks.total


@pytest.mark.parametrize(("fixed", "few", "many"), [(0, max(1, CORES // 2), CORES), (1, 1, 1), (3, 3, 3)])
def test_prompts_get_all_cores_unless_another_stage_feeds_them_or_the_setting_says_how_many(
    fixed: int, few: int, many: int
) -> None:
    before = torch.get_num_threads()
    try:
        threads = Threads(fixed)
        for rows, expected in ((1, few), (32, few), (2048, many), (8, few)):
            threads.use(rows, streamed=False)
            assert torch.get_num_threads() == expected
            threads.use(rows, streamed=True)
            assert torch.get_num_threads() == few
    finally:
        torch.set_num_threads(before)
