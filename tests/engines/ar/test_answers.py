"""What the engine writes is what transformers writes, however it is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.ar import tiny
from tests.engines.ar.asks import PROMPTS, ask, generated, reference, text_of, tokens_of
from tests.engines.ar.conftest import Serve
from tests.engines.helpers import collect, stage, started
from workers.engines.ar.engine import ArEngine


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
async def test_greedy_answers_equal_transformers(
    serve: Serve, checkpoints: dict[str, Path], kind: str
) -> None:
    async with serve(kind) as engine:
        for prompt in PROMPTS[::3]:
            assert tokens_of(await collect(engine, ask(prompt))) == generated(checkpoints[kind], prompt)


async def test_eight_unequal_requests_answer_as_they_do_alone(serve: Serve) -> None:
    async with serve() as engine:
        alone = [await collect(engine, ask(prompt)) for prompt in PROMPTS]
        together = await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in PROMPTS))
        sampled = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
        one_by_one = [await collect(engine, ask(prompt, seed=7, **sampled)) for prompt in PROMPTS]
        drawn = await asyncio.gather(*(collect(engine, ask(p, seed=7, **sampled)) for p in PROMPTS))
    assert list(map(tokens_of, together)) == list(map(tokens_of, alone))
    assert list(map(tokens_of, drawn)) == list(map(tokens_of, one_by_one))


async def test_a_prompt_read_in_pieces_equals_one_read_at_once(
    serve: Serve, checkpoints: dict[str, Path]
) -> None:
    async with serve(max_num_batched_tokens=16) as engine:
        widest = 0
        step = engine.thread.runner.step

        def watched(pieces: Any) -> Any:
            nonlocal widest
            widest = max(widest, sum(piece.stop - piece.start for piece in pieces))
            return step(pieces)

        engine.thread.runner.step = watched  # type: ignore[method-assign]
        answers = await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in PROMPTS))
    assert list(map(tokens_of, answers)) == [generated(checkpoints["llama"], p) for p in PROMPTS]
    assert widest == 16


async def test_jobs_that_lose_their_memory_lose_nothing_else(
    serve: Serve, checkpoints: dict[str, Path]
) -> None:
    layers, kv_heads, width, size = 3, 2, 8, 8
    block = 2 * layers * kv_heads * width * size * 4
    gib = 60 * block / 2**30  # 480 rows; the eight of them need 840
    async with serve(kv_cache_gib=gib, hidden_layers=[3]) as engine:
        answers = await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in PROMPTS))
        scheduler = engine.thread.scheduler
        assert scheduler.preemptions > 0
        assert scheduler.blocks.free == scheduler.blocks.total == 60
    assert list(map(tokens_of, answers)) == [generated(checkpoints["llama"], p) for p in PROMPTS]
    rows = [sum(len(payload["hidden"]) for payload in answer) for answer in answers]
    assert rows == [len(prompt) + 15 for prompt in PROMPTS]  # none of them twice


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 30},
    ],
    ids=["greedy", "penalty", "sampled", "all"],
)
async def test_an_answer_goes_on_after_a_break_as_if_there_were_none(
    serve: Serve, how: dict[str, Any]
) -> None:
    async with serve() as engine:
        whole = await collect(engine, ask(PROMPTS[3], tokens=32, seed=5, **how))
        assert tokens_of(await collect(engine, ask(PROMPTS[3], tokens=32, seed=5, **how))) == tokens_of(whole)
        cuts = (1, len(whole) // 2, len(whole) - 1, len(whole))
        work = [ask(PROMPTS[3], tokens=32, seed=5, resumed=whole[:cut], **how) for cut in cuts]
        rests = await asyncio.gather(*(collect(engine, each) for each in work))
    for cut, rest in zip(cuts, rests, strict=True):
        assert tokens_of(whole[:cut] + rest) == tokens_of(whole)
        assert text_of(whole[:cut] + rest) == text_of(whole)
        if rest:
            assert rest[-1]["completion_tokens"] == 32


async def test_another_seed_gives_another_answer(serve: Serve) -> None:
    async with serve() as engine:
        seeds = (1, 2, -1, 2**64 + 1, 2**70)
        answers = [await collect(engine, ask("Hi", seed=seed, temperature=1.0)) for seed in seeds]
    assert len({tuple(tokens_of(answer)) for answer in answers}) == 4  # 2**64 + 1 is 1 again


async def test_repetition_penalty_equals_transformers(serve: Serve, checkpoints: dict[str, Path]) -> None:
    async with serve() as engine:
        answer = await collect(engine, ask(PROMPTS[2], repetition_penalty=1.4))
    assert tokens_of(answer) == generated(checkpoints["llama"], PROMPTS[2], repetition_penalty=1.4)


def relative_error(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error of a row, relative to the row's length."""
    assert rows.shape == wanted.shape
    return float(((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize("rows_a_step", [2048, 16])
async def test_hidden_states_equal_transformers(
    serve: Serve, checkpoints: dict[str, Path], rows_a_step: int
) -> None:
    layers = [0, 2, 3]
    async with serve(hidden_layers=layers, max_num_batched_tokens=rows_a_step) as engine:
        answers = await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in PROMPTS[:4]))
        resumed = await collect(engine, ask(PROMPTS[3], resumed=answers[3][:5]))
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        said = generated(
            checkpoints["llama"], prompt, return_dict_in_generate=True, output_hidden_states=True
        )
        wanted = [torch.cat([step[layer][0] for step in said.hidden_states]) for layer in layers]
        rows = torch.cat([payload["hidden"] for payload in answer])
        assert len(answer[0]["hidden"]) == len(prompt)  # all of the prompt in the first payload
        assert relative_error(rows, torch.stack(wanted, 1)) < 1e-4
    rest = torch.cat([payload["hidden"] for payload in answers[3][5:]])
    assert relative_error(torch.cat([payload["hidden"] for payload in resumed]), rest) < 1e-4


async def test_a_sliding_window_is_kept(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1)
    assert "sliding_attention" in reference(tmp_path)[0].config.layer_types

    options = {"kv_cache_gib": 0.005, "block_size": 8, "max_num_batched_tokens": 32}
    async with started(ArEngine(stage("ar", model=str(tmp_path), options=options), device="cpu")) as engine:
        answers = await asyncio.gather(*(collect(engine, ask(prompt)) for prompt in PROMPTS[2:5]))
    assert list(map(tokens_of, answers)) == [generated(tmp_path, prompt) for prompt in PROMPTS[2:5]]


async def test_text_ends_at_stop_tokens_and_stop_strings(serve: Serve) -> None:
    async with serve() as engine:
        whole = await collect(engine, ask(PROMPTS[1], tokens=40))
        text = text_of(whole)
        stop = text[10:13]
        cut = await collect(engine, ask(PROMPTS[1], tokens=40, stop=[stop]))
        assert text_of(cut) == text[: text.index(stop)]
        assert cut[-1]["finish_reason"] == "stop"
        assert cut[-1]["completion_tokens"] == len(tokens_of(cut)) < 40
        engine.thread.runner._stops = frozenset(tokens_of(whole)[6:7])
        ended = await collect(engine, ask(PROMPTS[1], tokens=40, ignore_eos=False))
        assert tokens_of(ended) == tokens_of(whole)[: tokens_of(whole).index(tokens_of(whole)[6]) + 1]
        assert ended[-1]["finish_reason"] == "stop"
        assert whole[-1]["finish_reason"] == "length"
