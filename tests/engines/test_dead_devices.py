"""After an error of the device nothing that a process computes can be trusted, so it ends.

Else it would fail all jobs that come, at once, and so get more of them than the engines that work.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest

from workers.engines.engine_thread import EXIT_ENGINE_DEAD

pytest.importorskip("torch")

#: What a process does whose device fails.
WHERE = {
    "a batch": """
        class Engine(BatchingEngine):
            def forward(self, items): fail()

        engine = Engine(Stage("some"), device="cpu")
        await engine.start()
        await engine.submit(1)
    """,
    "the beginning of a picture": """
        thread = DiffusionThread(lambda: SimpleNamespace(denoiser=None, passes=PASSES), 1)
        await thread.start()
        thread.add(Painting(begin=fail, sink=asyncio.Queue()))
    """,
    "between two steps of a picture": """
        runner = Runner(SimpleNamespace(guide=fail), PASSES, 1)
        thread = DiffusionThread(lambda: runner, 1)
        await thread.start()
        canvas = SimpleNamespace(rows=[])
        begin = lambda *given: None
        thread.add(Painting(begin=begin, over=False, canvas=canvas, sink=asyncio.Queue()))
    """,
    "a call": """
        thread = DiffusionThread(lambda: SimpleNamespace(passes=PASSES), 1)
        await thread.start()
        await thread.call(fail)
    """,
}


@pytest.mark.parametrize("where", WHERE)
async def test_an_engine_whose_device_failed_ends(where: str) -> None:
    code = f"""
import asyncio
from types import SimpleNamespace
from pipelines.graph import Stage
from workers.batching import BatchingEngine
from workers.engines.diffusion.passes import Passes
from workers.engines.diffusion.runner import Runner
from workers.engines.diffusion.thread import DiffusionThread

def fail(*given):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

class Painting(SimpleNamespace):
    __hash__ = object.__hash__

PASSES = Passes(SimpleNamespace(forward=fail), 1)

async def main():
{textwrap.indent(textwrap.dedent(WHERE[where]), "    ")}
    await asyncio.sleep(5)  # long enough for a thread that goes on to be seen

asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == EXIT_ENGINE_DEAD, done.stderr
    assert "so this process ends" in done.stderr
    assert "illegal memory access" in done.stderr
