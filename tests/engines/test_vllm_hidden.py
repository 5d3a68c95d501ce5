"""Hidden states of vLLM equal transformers', whatever happened to their request on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

from adapters.chunk import Payload
from tests.engines import checkpoints
from tests.engines.helpers import collect, stage, started, stream, until
from workers.engine import Job
from workers.engines.vllm import VllmEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYERS = [0, 2, 4]  # the embeddings, one in the middle, the last
CONTEXT = 512
WIDTH = 128
SETTINGS: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": 48,  # so few that most prompts below are read in several steps
    "kv_cache_gib": 0.0035,  # 8 blocks of 128 tokens, of which one request needs up to 4
}


class House(NamedTuple):
    engine: VllmEngine
    model: Any  #: transformers'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    return tmp_path_factory.mktemp("llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(folder: Path) -> AsyncIterator[House]:
    model = checkpoints.llama(folder)
    settings = {"model": str(folder), "options": SETTINGS | {"hidden_layers": LAYERS}}
    async with started(VllmEngine(stage("vllm", **settings), device="cpu")) as engine:
        yield House(engine, model)


class Watched:
    """What vLLM did meanwhile."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.preempted = 0
        self.cached_tokens: int | None = None
        scheduler = engine.engine_core.engine_core.scheduler
        preempt, step = scheduler._preempt_request, engine.step

        def counted(*arguments: Any, **settings: Any) -> Any:
            self.preempted += 1
            return preempt(*arguments, **settings)

        def looked_at() -> Any:
            outputs = step()
            for output in outputs:
                self.cached_tokens = output.num_cached_tokens
            return outputs

        monkeypatch.setattr(scheduler, "_preempt_request", counted)
        monkeypatch.setattr(engine, "step", looked_at)


@pytest.fixture
def watched(house: House, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(house.engine.vllm.engine, monkeypatch)


def text(length: int, seed: int = 0) -> str:
    """So many tokens of prompt."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def ask(prompt: str, tokens: int = 12, *, resumed: list[Payload] | None = None, **params: Any) -> Job:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, **params}
    return Job("test", {"request": stream([{"prompt": prompt}])}, params, 1, resumed=resumed)


def small(payload: Payload) -> Payload:
    """What a later attempt is told of a payload that is out."""
    return {name: value for name, value in payload.items() if name != "hidden"}


def tokens_of(payloads: list[Payload]) -> list[int]:
    return [token for payload in payloads for token in payload["token_ids"]]


def rows_of(payloads: list[Payload]) -> Any:
    return np.concatenate([payload["hidden"].numpy() for payload in payloads if "hidden" in payload])


def right(house: House, prompt: str, payloads: list[Payload], *, greedy: bool = True) -> None:
    """Asserts that an answer has transformers' tokens, and its states: each row once, in order."""
    import torch

    answer = tokens_of(payloads)
    ids = house.engine.vllm.engine.get_tokenizer().encode(prompt)
    with torch.no_grad():
        out = house.model(torch.tensor([ids + answer[:-1]]), output_hidden_states=True)
    if greedy:
        assert out.logits[0, len(ids) - 1 :].argmax(-1).tolist() == answer
    expected = torch.stack([out.hidden_states[layer][0] for layer in LAYERS], 1).numpy()
    rows = rows_of(payloads)
    assert rows.shape == expected.shape == (len(ids) + len(answer) - 1, len(LAYERS), WIDTH)
    for place, layer in enumerate(LAYERS):
        error = np.abs(rows[:, place] - expected[:, place]).max() / np.abs(expected[:, place]).max()
        assert error < 1e-3, f"layer {layer}"


async def test_unequal_requests_at_once_each_get_their_rows_with_their_tokens(house: House) -> None:
    prompts = [text(length, seed=length) for length in (1, 7, 47, 48, 49, 110, 127, 128)]
    answers = await asyncio.gather(*(collect(house.engine, ask(prompt)) for prompt in prompts))
    for prompt, payloads in zip(prompts, answers, strict=True):
        right(house, prompt, payloads)
        assert [len(payload["token_ids"]) for payload in payloads] == [1] * 12
        assert [len(payload["hidden"]) for payload in payloads] == [len(prompt)] + [1] * 11


async def test_rows_that_are_out_do_not_come_again_with_a_resumed_answer(house: House) -> None:
    prompt = text(60, seed=1)
    whole = await collect(house.engine, ask(prompt))
    for cut in (0, 1, 7, 11):
        out = [small(payload) for payload in whole[:cut]]
        rest = await collect(house.engine, ask(prompt, resumed=out))
        assert [len(payload["hidden"]) for payload in rest] == [
            len(payload["hidden"]) for payload in whole[cut:]
        ]
        right(house, prompt, whole[:cut] + rest)
    assert await collect(house.engine, ask(prompt, resumed=[small(payload) for payload in whole])) == []


async def test_rows_of_a_prompt_that_vllm_has_cached(house: House, watched: Watched) -> None:
    prompt = text(300, seed=2)
    for cached in (0, 256):
        payloads = await collect(house.engine, ask(prompt, 3))
        right(house, prompt, payloads)
        assert watched.cached_tokens == cached
    longer = prompt[:290] + "and so on"
    right(house, longer, await collect(house.engine, ask(longer, 3)))
    assert watched.cached_tokens == 256


async def test_rows_of_requests_that_vllm_put_aside_for_a_while(house: House, watched: Watched) -> None:
    prompts = [text(length, seed=length) for length in (90, 100, 110, 115, 120, 121)]
    answers = await asyncio.gather(*(collect(house.engine, ask(prompt, 40)) for prompt in prompts))
    assert watched.preempted > 0
    for prompt, payloads in zip(prompts, answers, strict=True):
        right(house, prompt, payloads)


async def test_an_answer_up_to_the_end_of_the_context(house: House) -> None:
    prompt = text(CONTEXT - 5, seed=3)
    beside, payloads = await asyncio.gather(
        collect(house.engine, ask(text(9), 30)), collect(house.engine, ask(prompt, 100))
    )
    assert len(tokens_of(payloads)) == 5
    right(house, prompt, payloads)
    right(house, text(9), beside)


async def test_a_sampled_answer_with_rows_goes_on_after_a_break_with_the_same_draws(house: House) -> None:
    prompts = ["a", text(50, seed=4), "b", "c"]  # those of one token are what vLLM would add drafts to
    params: dict[str, Any] = {"tokens": 20, "temperature": 1.0, "repetition_penalty": 1.1}
    wholes = [await collect(house.engine, ask(prompt, **params)) for prompt in prompts]
    for cut in (0, 1, 9):
        work = [
            ask(prompt, resumed=list(map(small, whole[:cut])), **params)
            for prompt, whole in zip(prompts, wholes, strict=True)
        ]
        rests = await asyncio.gather(*(collect(house.engine, each) for each in work))
        for prompt, whole, rest in zip(prompts, wholes, rests, strict=True):
            assert tokens_of(whole[:cut] + rest) == tokens_of(whole)
            right(house, prompt, whole[:cut] + rest, greedy=False)


async def test_nothing_is_kept_of_requests_that_ended_or_were_left(house: House) -> None:
    left = house.engine.run(ask(text(200, seed=5), 200))
    await anext(left)
    queued = [asyncio.ensure_future(collect(house.engine, ask(text(100, seed=6), 100))) for _ in range(9)]
    await until(lambda: house.engine.vllm.unfinished == 10)
    await left.aclose()
    for task in queued:
        task.cancel()
    await asyncio.gather(*queued, return_exceptions=True)
    await until(lambda: house.engine.vllm.unfinished == 0)
    right(house, "next", await collect(house.engine, ask("next")))
    scheduler = house.engine.vllm.engine.engine_core.engine_core.scheduler
    assert scheduler.connector._requests == scheduler.connector._next == {}
    assert house.engine.vllm._take_rows() == {}


async def test_a_model_on_several_devices_is_refused_at_the_start(house: House, folder: Path) -> None:
    settings = {"model": str(folder), "options": SETTINGS | {"hidden_layers": [1]}}
    spread = stage("vllm", resources={"tensor_parallel_size": 2}, **settings)
    with pytest.raises(ValueError, match="hidden_layers: needs a model on one device"):
        await VllmEngine(spread, device="cpu").start()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hidden_layers": [0, 5]}, r"hidden_layers: is \[0, 5\].*ascending.* 4 "),
        ({"hidden_layers": [2, 0]}, r"hidden_layers: is \[2, 0\].*ascending"),
        ({"hidden_layers": [1, 1]}, r"hidden_layers: is \[1, 1\].*repeats"),
        ({"hidden_layers": [1], "engine_args": {"scheduler_cls": None}}, "engine_args.scheduler_cls"),
    ],
)
async def test_layers_that_cannot_be_had_are_refused_at_the_start(
    house: House, folder: Path, options: dict[str, Any], named: str
) -> None:
    engine = VllmEngine(stage("vllm", model=str(folder), options=SETTINGS | options), device="cpu")
    with pytest.raises(ValueError, match=named):
        await engine.start()
