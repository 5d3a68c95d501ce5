"""Steps of fixed sizes, as CUDA graphs want them, compute what steps of their own size compute.

There is no GPU here: the pass that a graph would record is run again at each replay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.ar.asks import PROMPTS, ask, generated, tokens_of
from tests.engines.ar.conftest import Serve
from tests.engines.helpers import collect, stage
from workers.engines.ar import graphs
from workers.engines.ar.engine import ArEngine
from workers.engines.ar.family import Forward
from workers.engines.ar.runner import capture_sizes


class Recorded:
    """In the place of torch.cuda.CUDAGraph: it reads the buffers and writes the same ones each time."""

    def __init__(self, captured: graphs.Captured, forward: Callable[..., Forward]) -> None:
        self._captured, self._forward = captured, forward
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        out = self._captured._pass(self._forward)
        self._captured._out.last.copy_(out.last)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    made: list[Recorded] = []

    def capture(self: graphs.Captured, forward: Callable[..., Forward], memory: Any) -> None:
        self._graph = Recorded(self, forward)
        self._out = self._pass(forward)
        made.append(self._graph)

    monkeypatch.setattr(graphs.Captured, "warm_up", lambda self, forward: self._pass(forward))
    monkeypatch.setattr(graphs.Captured, "capture", capture)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    return made


async def test_captured_steps_write_what_others_write(
    serve: Serve, checkpoints: dict[str, Path], recorded: list[Recorded]
) -> None:
    async with serve() as engine:
        runner = engine.thread.runner
        runner._graphs = graphs.Graphs(engine.model, runner.pages, capture_sizes(8))
        await engine.thread.call(runner._graphs.prepare)
        assert len(recorded) == 4
        for prompts in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
            answers = await asyncio.gather(*(collect(engine, ask(prompt, tokens=12)) for prompt in prompts))
            wanted = [generated(checkpoints["llama"], prompt, 12) for prompt in prompts]
            assert list(map(tokens_of, answers)) == wanted
        assert not runner.pages.keys[:, : runner.pages.scratch].isnan().any()
    assert 4 < len(recorded) < 10
    assert sum(each.replays for each in recorded) >= 30


async def test_a_pass_that_cannot_be_compiled_or_captured_runs_as_it_is(
    serve: Serve,
    checkpoints: dict[str, Path],
    recorded: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: broken)
    async with serve() as engine:
        runner = engine.thread.runner
        runner._graphs = graphs.Graphs(engine.model, runner.pages, capture_sizes(8))
        assert len(tokens_of(await collect(engine, ask(PROMPTS[1], tokens=4)))) == 4
        assert recorded[0].replays == 3
        monkeypatch.setattr(graphs.Captured, "capture", broken)
        runner._graphs = graphs.Graphs(engine.model, runner.pages, capture_sizes(8))
        answer = await collect(engine, ask(PROMPTS[1], tokens=4))
    assert tokens_of(answer) == generated(checkpoints["llama"], PROMPTS[1], 4)
    assert "torch.compile failed" in caplog.text
    assert "no CUDA graph" in caplog.text


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
async def test_the_engines_device_is_its_threads_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, current: list[str]
) -> None:
    """Else a graph is captured on the first GPU, where nothing runs, and replays give an old step's rows."""
    told: list[tuple[str, str]] = []

    def tell(where: torch.device) -> None:
        told.append((str(where), threading.current_thread().name))

    def load(folder: Path, options: Any, where: torch.device) -> None:
        tell(where)
        raise ValueError("no weights")

    monkeypatch.setattr(torch.cuda, "set_device", tell)
    monkeypatch.setattr("workers.engines.ar.engine.model_class", lambda name: load)
    engine = ArEngine(stage("ar", model=str(tmp_path)), device=device)
    with pytest.raises(ValueError, match="no weights"):
        await engine.start()
    assert told == [(name, "ar") for name in [*current, device]]


def test_few_sizes_cover_every_batch() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
