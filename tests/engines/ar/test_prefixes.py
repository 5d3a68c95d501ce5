"""Beginnings that prompts have in common are read once, and nobody gets another's."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from typing import Any

import pytest
import torch

from tests.engines.ar.asks import WORDS, ask, tokens_of
from tests.engines.ar.conftest import Serve
from tests.engines.ar.test_limits import BLOCK
from tests.engines.ar.test_rows import codes_of, start_of, talk, talkers, whole
from tests.engines.helpers import collect, until
from workers.engine import ItemError, Stream
from workers.engines.ar.attention import Pages
from workers.engines.ar.engine import ArEngine
from workers.engines.ar.family import Layout, Prompt
from workers.engines.ar.prefixes import Prefixes, names_of
from workers.engines.ar.schedule import Piece
from workers.engines.ar.sequence import Choice, Sequence

LONG = WORDS[:60]  # seven blocks of 8 tokens and 4 rows
NONE = {"prefix_cache_gib": 0}


def rows_read(engine: ArEngine) -> list[int]:
    """Grows by each step's rows."""
    read: list[int] = []
    step = engine.thread.runner.step

    def counted(pieces: list[Piece]) -> Any:
        read.append(sum(piece.stop - piece.start for piece in pieces))
        return step(pieces)

    engine.thread.runner.step = counted  # type: ignore[method-assign]
    return read


def hidden_of(payloads: list[Any]) -> torch.Tensor:
    return torch.cat([payload["hidden"] for payload in payloads if "hidden" in payload])


@pytest.mark.parametrize("layers", [[], [0, 2, 3]])
async def test_a_prompt_that_begins_as_an_earlier_one_is_read_from_where_they_part(
    serve: Serve, layers: list[int]
) -> None:
    prompts = [LONG + "one", LONG + "other ones", LONG[:30], LONG + "one"]
    async with serve(hidden_layers=layers, **NONE) as engine:
        alone = [await collect(engine, ask(prompt)) for prompt in prompts]
    async with serve(hidden_layers=layers) as engine:
        read = rows_read(engine)
        for prompt, expected, rows in zip(prompts, alone, (63, 70 - 56, 30 - 24, 63 - 56), strict=True):
            read.clear()
            answer = await collect(engine, ask(prompt))
            assert read[0] == rows
            assert tokens_of(answer) == tokens_of(expected)
            if layers:
                torch.testing.assert_close(hidden_of(answer), hidden_of(expected), atol=1e-4, rtol=1e-4)


async def test_a_prompt_read_in_pieces_is_kept_whole(serve: Serve) -> None:
    async with serve(max_num_batched_tokens=16, hidden_layers=[3]) as engine:
        first = await collect(engine, ask(LONG))
        read = rows_read(engine)
        again = await collect(engine, ask(LONG))
    assert read[0] == 60 - 56
    assert tokens_of(again) == tokens_of(first)
    torch.testing.assert_close(hidden_of(again), hidden_of(first), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [[], [3]])
async def test_jobs_that_lost_their_memory_or_go_on_after_a_break_find_it_too(
    serve: Serve, layers: list[int]
) -> None:
    async with serve(hidden_layers=layers, **NONE) as engine:
        expected = await collect(engine, ask(LONG, tokens=30))
    async with serve(kv_cache_gib=27 * BLOCK / 2**30, hidden_layers=layers) as engine:
        answers = await asyncio.gather(*(collect(engine, ask(LONG, tokens=30)) for _ in range(4)))
        assert engine.thread.scheduler.preemptions > 0
        assert [tokens_of(answer) for answer in answers] == [tokens_of(expected)] * 4
        read = rows_read(engine)
        rest = await collect(engine, ask(LONG, tokens=30, resumed=expected[:7]))
        assert tokens_of(expected[:7] + rest) == tokens_of(expected)
        assert read[0] == 60 + len(tokens_of(expected[:7])) - 56
    if layers:
        told = hidden_of(expected[:7] + rest)
        torch.testing.assert_close(told, hidden_of(expected), atol=1e-4, rtol=1e-4)


async def test_rows_of_a_stage_before_are_known_by_what_they_hold() -> None:
    async with talkers() as engine:
        first = await collect(engine, talk(whole(30)))
        read = rows_read(engine)
        assert codes_of(await collect(engine, talk(whole(30)))) == codes_of(first)
        assert read[0] == 30 - 24
        read.clear()
        other = start_of(30)
        other[9] += 1  # in the second block
        await collect(engine, talk(Stream([{"start": other}], closed=True)))
        assert read[0] == 30 - 8


async def test_what_is_kept_has_a_bound_and_the_longest_unwanted_goes(serve: Serve) -> None:
    async with serve(prefix_cache_gib=8 * BLOCK / 2**30) as engine:
        prefixes = engine.thread.runner.prefixes
        assert prefixes is not None
        memory = prefixes._shelf.keys.data_ptr()
        read = rows_read(engine)

        async def rows_of(prompt: str) -> int:
            read.clear()
            await collect(engine, ask(prompt))
            return read[0]

        assert await rows_of("a" * 33) == 33  # four blocks each
        assert await rows_of("b" * 33) == 33
        assert await rows_of("a" * 33) == 1
        assert await rows_of("c" * 33) == 33
        assert await rows_of("a" * 33) == 1
        assert await rows_of("b" * 33) == 33
        assert await rows_of("d" * 200) == 200  # longer than all of it: its beginning is kept
        assert await rows_of("d" * 200) == 200 - 64
        assert len(prefixes._kept) == 8
        assert prefixes._shelf.keys.data_ptr() == memory


async def test_a_prompt_that_fails_is_not_kept(serve: Serve) -> None:
    async with serve() as engine:
        embed = engine.model.embed
        engine.model.embed = lambda codes, rows: embed(codes, rows) * torch.nan  # type: ignore[method-assign]
        with pytest.raises(ItemError, match="not finite"):
            await collect(engine, ask(LONG))
        engine.model.embed = embed  # type: ignore[method-assign]
        assert not engine.thread.runner.prefixes._kept  # type: ignore[union-attr]
        assert await collect(engine, ask(LONG))


@pytest.mark.parametrize("failing", range(1, 5))
async def test_a_copy_that_fails_costs_nobody_a_token(serve: Serve, failing: int) -> None:
    """As it does where the device has no memory left for it."""
    asks = [LONG, LONG[::-1]]
    async with serve(**NONE) as engine:
        plain = [tokens_of(await collect(engine, ask(prompt))) for prompt in asks]
    async with serve() as engine:
        prefixes, calls = engine.thread.runner.prefixes, 0
        assert prefixes is not None
        copy = prefixes._copy

        def fails(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise RuntimeError("out of memory")
            copy(*arguments)

        prefixes._copy = fails  # type: ignore[method-assign]
        for _ in range(3):
            answers = await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in asks))
            assert [tokens_of(answer) for answer in answers] == plain
        assert calls > failing


def test_names_tell_apart_all_that_a_row_depends_on() -> None:
    embeds, positions = torch.randn(20, 4), torch.arange(40).view(2, 20)
    prompt = Prompt([0] * 20, embeds, positions, extras={"deep": torch.zeros(20, 3)})

    def changed(row: int, **changes: torch.Tensor) -> list[bool]:
        """Which of the two whole blocks keep their names."""
        copies = {name: value.clone() for name, value in changes.items()}
        for value in copies.values():
            (value if len(value) == 20 else value.t())[row] += 1
        extras = {"deep": copies.pop("deep")} if "deep" in copies else prompt.extras
        other = dataclasses.replace(prompt, extras=extras, **copies)  # type: ignore[arg-type]
        return [a == b for a, b in zip(names_of(prompt, 8), names_of(other, 8), strict=True)]

    for what in ({"embeds": embeds}, {"positions": positions}, {"deep": prompt.extras["deep"]}):
        assert changed(3, **what) == [False, False]
        assert changed(12, **what) == [True, False]
        assert changed(17, **what) == [True, True]
    assert names_of(Prompt([1, 2, 3]), 2) == names_of(Prompt([1, 2, 4, 5]), 2)[:1]
    assert names_of(Prompt([1]), 2) == names_of(Prompt([], torch.zeros(0, 4)), 2) == []
    assert names_of(Prompt([], embeds.bfloat16()), 8) != names_of(Prompt([], embeds), 8)


@pytest.mark.parametrize("seed", range(30))
def test_restored_rows_are_always_those_of_the_same_beginning(seed: int) -> None:
    """Against random lives: each row's key says which beginning it was computed from."""
    rng = random.Random(seed)
    size, slots = rng.choice([1, 2, 3]), rng.randint(1, 12)
    pages = Pages(Layout(1, 1, 1, torch.float32), 40, size, torch.device("cpu"))
    prefixes = Prefixes(Layout(1, 1, 1, torch.float32), pages, slots, [0])
    numbers: dict[tuple[int, ...], float] = {}
    hits = 0

    def meant(ids: list[int], row: int) -> float:
        return numbers.setdefault(tuple(ids[: row + 1]), float(len(numbers) + 1))

    for _ in range(200):
        ids = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
        one = Sequence("", Prompt(ids), Choice(0), 5)
        one.blocks = rng.sample(range(40), -(-len(ids) // size))
        prefixes.restore(one)
        hits += bool(one.computed)
        assert one.computed < len(ids)
        places = [(one.blocks[row // size], row % size) for row in range(len(ids))]
        for row, (block, place) in enumerate(places):
            if row < one.computed:
                assert pages.keys[0, block, 0, 0, place] == pages.values[0, block, 0, place, 0]
                assert pages.keys[0, block, 0, 0, place] == meant(ids, row)
            pages.keys[0, block, 0, 0, place] = pages.values[0, block, 0, place, 0] = meant(ids, row)
        computed = torch.tensor([[meant(ids, row)] for row in range(one.computed, len(ids))])
        hidden = torch.cat([*one.held.get(0, []), computed])
        assert hidden.flatten().tolist() == [meant(ids, row) for row in range(len(ids))]
        if rng.random() < 0.8:
            prefixes.keep(one, {0: hidden})
        assert len({kept.slot for kept in prefixes._kept.values()}) == len(prefixes._kept) <= slots
    assert hits


async def test_prompts_that_come_at_once_are_read_where_they_differ(serve: Serve) -> None:
    """Several choices of one request, say: only the first has to be read."""
    prompts = [LONG + "one", LONG + "two", LONG + "one", LONG[:17], "x" * 60, "y" + LONG]
    async with serve(**NONE) as engine:
        alone = [await collect(engine, ask(prompt)) for prompt in prompts]
    async with serve() as engine:
        read, gate = rows_read(engine), threading.Event()
        held = asyncio.create_task(engine.thread.call(gate.wait))
        jobs = [asyncio.create_task(collect(engine, ask(prompt))) for prompt in prompts]
        await until(lambda: engine.thread._commands.qsize() >= len(jobs))
        gate.set()
        answers = await asyncio.gather(*jobs)
        await held
    assert [tokens_of(answer) for answer in answers] == [tokens_of(answer) for answer in alone]
    assert read[0] == 63 + 60 + 61, "one of those with a beginning in common, and those without"
    assert read[1] >= 2 * (63 - 56) + (17 - 16)
