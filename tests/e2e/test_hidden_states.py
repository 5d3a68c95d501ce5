"""Hidden states on their way out of a real worker, which is killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines import checkpoints
from tests.house import House

START_S = 240.0  # vllm loads in 20 s, on a machine that has nothing else to do
LAYERS = [0, 4]
PIPELINE = """
name: states
outputs: {{text: thinker}}
endpoints:
  chat: {{input: request, outputs: [text]}}
stages:
  thinker:
    engine: vllm
    model: {folder}
    options: {{max_model_len: 512, kv_cache_gib: 0.05, hidden_layers: {layers}}}
edges:
  - {{from: request, to: thinker}}
# Killed while its reader waits, the thinker is at most so far ahead.
limits: {{ahead_chunks: 8}}
"""


@pytest.mark.models
async def test_rows_come_once_though_the_worker_is_killed(
    house: Callable[..., House], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoTokenizer

    model = checkpoints.llama(tmp_path)
    (tmp_path / "states.yaml").write_text(PIPELINE.format(folder=tmp_path, layers=LAYERS))
    home = house()
    home.start("--pipeline", str(tmp_path / "states.yaml"), ready=False)
    await asyncio.to_thread(home.until, home.is_ready, START_S)
    prompt, payloads = "Once upon a time there was a fox. " * 8, []
    request: dict[str, Any] = {
        "given": {"request": [{"prompt": prompt}]},
        "params": {"thinker": {"max_tokens": 60, "ignore_eos": True, "temperature": 0}},
        "outputs": ["text"],
    }
    async with home.client() as client, await client.submit("states", **request) as stream:
        async for _, payload in stream:
            payloads.append({**payload, "hidden": np.array(payload["hidden"])})
            if len(payloads) == 5:
                (pid,) = await asyncio.to_thread(home.pids, "states", "thinker")
                os.kill(pid, signal.SIGKILL)
    assert [timing.attempts for timing in stream.timings] == [2]
    tokens = [token for payload in payloads for token in payload["token_ids"]]
    ids = AutoTokenizer.from_pretrained(tmp_path).encode(prompt)
    with torch.no_grad():
        out = model(torch.tensor([ids + tokens[:-1]]), output_hidden_states=True)
    assert out.logits[0, len(ids) - 1 :].argmax(-1).tolist() == tokens
    assert len(tokens) == 60
    expected = torch.stack([out.hidden_states[layer][0] for layer in LAYERS], 1).numpy()
    rows = np.concatenate([payload["hidden"] for payload in payloads])
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max() < 1e-3 * np.abs(expected).max()
