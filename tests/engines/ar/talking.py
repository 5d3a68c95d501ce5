"""A model file for tests: frames of two codes, made from rows that come over a streaming edge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import ItemError, Job
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.engines.ar.sampling import Draws

HIDDEN, CODES, STOP = 32, 40, 3


class Parts(nn.Module):
    """The weights; the same each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=CODES,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.4,
        )
        self.decoder = LlamaModel(config).eval()
        self.tables = nn.ModuleList([nn.Embedding(CODES, HIDDEN) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, CODES, bias=False) for _ in range(2)])


class Talker(Model):
    """Prompt: "start" float [n, hidden]. Rows: "rows" [k, hidden] of later payloads, then zeros."""

    codebooks = 2
    stop_ids = (STOP,)
    suppressed_ids = (0,)
    max_positions = 200

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        self.parts = Parts().to(device)
        self.decoder = use_pages(self.parts.decoder)
        self.layout = Layout.of(self.decoder.config, torch.float32)

    async def begin(self, job: Job) -> Work | None:
        payloads = job.inputs["thinker"]
        first = await anext(payloads)
        if "start" not in first:
            raise ItemError("there is no start", status=400)
        start = torch.as_tensor(first["start"])
        written = [frame for payload in job.resumed for frame in payload["codes"]]
        if job.resumed and "finish_reason" in job.resumed[-1]:
            return None
        # The penalty looks at codes alone; the positions leave a gap after the prompt.
        prompt = Prompt([], start, torch.arange(len(start))[None], len(start) + 3)
        return Work(prompt, Frames(), job.params, written, self._rows(payloads), torch.zeros(HIDDEN))

    async def _rows(self, payloads: AsyncIterator[Payload]) -> AsyncIterator[torch.Tensor]:
        async for payload in payloads:
            if "error" in payload:
                raise ItemError(payload["error"])
            yield torch.as_tensor(payload["rows"])

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        assert rows is not None
        tables = self.parts.tables
        embedded: torch.Tensor = tables[0](codes[:, 0]) + tables[1](codes[:, 1]) + rows
        return embedded

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.parts.heads[0](last)
        return scores

    def codes(self, last: torch.Tensor, tokens: torch.Tensor, draws: Draws) -> torch.Tensor:
        second = self.parts.heads[1](last + self.parts.tables[0](tokens))
        return torch.stack([tokens, draws.pick(second, 1, top_k=30)], 1)


class Frames:
    """{"codes": [[q]]} for each frame."""

    stopped = False

    def push(self, step: Step) -> Payload | None:
        payload: Payload = {"codes": [] if step.finish == "stop" else [step.codes]}
        return payload if step.finish is None else payload | {"finish_reason": step.finish}


@torch.no_grad()
def expected(start: torch.Tensor, rows: torch.Tensor, count: int) -> list[list[int]]:
    """The greedy frames, computed anew from the beginning for each of them, without any cache."""
    parts = Parts()
    frames: list[list[int]] = []
    embeds = start
    while len(frames) < count:
        positions = torch.arange(len(embeds))
        positions[len(start) :] += 3
        out: Any = parts.decoder(
            inputs_embeds=embeds[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, len(embeds)),  # else the gap is taken for two packed sequences
            use_cache=False,
        )
        last = out.last_hidden_state[0, -1]
        scores = parts.heads[0](last)
        scores[0] = -torch.inf
        token = scores.argmax()
        second = parts.heads[1](last + parts.tables[0](token)).argmax()
        row = rows[len(frames)] if len(frames) < len(rows) else torch.zeros(HIDDEN)
        frames.append([int(token), int(second)])
        embeds = torch.cat([embeds, (parts.tables[0](token) + parts.tables[1](second) + row)[None]])
    return frames
