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
from tests.engines.helpers import collect, stage, started, stream
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
    return tmp_path_factory.mktemp("llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(folder: Path) -> AsyncIterator[House]:
    model = checkpoints.llama(folder)
    settings = {"model": str(folder), "options": SETTINGS | {"hidden_layers": LAYERS}}
    async with started(VllmEngine(stage("vllm", **settings), device="cpu")) as engine:
        yield House(engine, model)


def text(length: int, seed: int = 0) -> str:
    """So many tokens of prompt."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def ask(prompt: str, tokens: int = 12, *, resumed: list[Payload] | None = None, **params: Any) -> Job:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, **params}
    return Job("test", {"request": stream([{"prompt": prompt}])}, params, 1, resumed=resumed)


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
