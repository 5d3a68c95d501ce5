"""Jobs for text models, and what transformers makes of the same prompts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from adapters.chunk import Payload
from tests.engines.helpers import stream
from workers.engine import Job

WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps until the sun comes up again"
#: Eight prompts of 5 to 173 tokens.
PROMPTS = [(WORDS * 2)[: 5 + 24 * number] for number in range(8)]


def ask(
    prompt: str, *, seed: int = 1, resumed: list[Payload] | None = None, tokens: int = 16, **params: Any
) -> Job:
    """A job that writes exactly so many tokens, greedily, unless its params say otherwise."""
    wishes = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
    return Job("test", {"request": stream([{"prompt": prompt}])}, wishes, seed, resumed=resumed)


def tokens_of(payloads: list[Payload]) -> list[int]:
    return [token for payload in payloads for token in payload["token_ids"]]


def text_of(payloads: list[Payload]) -> str:
    return "".join(payload["text"] for payload in payloads)


@functools.cache
def reference(folder: Path) -> Any:
    """transformers' own model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def generated(folder: Path, prompt: str, tokens: int = 16, **how: Any) -> Any:
    """transformers' greedy answer: its token ids, or all that ``generate`` gives with ``return_dict...``."""
    import torch

    model, tokenizer = reference(folder)
    ids = torch.tensor([tokenizer.encode(prompt)])
    settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **how}
    with torch.no_grad():
        out = model.generate(ids, **settings)
    return out if how.get("return_dict_in_generate") else out[0, ids.shape[1] :].tolist()
