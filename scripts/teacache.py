"""``scripts/calibrate_teacache``: fits TeaCache's polynomial to what a pipeline's denoiser does in its steps.

Prompts are painted without a cache, by the pipeline's own stages in this process. Of each branch and each two
neighbouring steps two numbers are noted: how much changed what the first block looks at, and how much changed
what all blocks added. The polynomial tells the second from the first. Both are relative L1 distances. It is
printed as JSON with its fit, and as the setting that a pipeline.yaml or --stage takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adapters.chunk import Payload
from pipelines.graph import Pipeline
from pipelines.loader import load
from scripts.inside import inside
from workers.engines.diffusion.passes import Passes

if TYPE_CHECKING:
    import torch

    from workers.engines.diffusion.family import Row

PROMPTS = (
    "a red circle at the top left on a white background",
    "a small blue star in the middle of a black background",
    "a lighthouse above a stormy sea, oil on canvas",
    "three glass bottles on a windowsill in the morning sun",
    "a street in the rain at night, neon signs, people with umbrellas",
    "portrait of an old fisherman with a white beard",
    "a bowl of lemons on a striped cloth, seen from above",
    "green hills, a single tree, high white clouds",
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/calibrate_teacache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pipeline", help="a name, a YAML file or a folder")
    parser.add_argument("--model", help="as `omni-broker start` takes it")
    parser.add_argument("--stage", action="append", default=[], metavar="SETTING", help="as start takes it")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda:0, of all stages")
    parser.add_argument("--prompts", type=Path, help="a file with one prompt in each line")
    parser.add_argument("--count", type=int, default=16, help="pictures to paint (default 16)")
    parser.add_argument("--degree", type=int, default=4, help="of the polynomial (default 4)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a request's parameter, like num_inference_steps=30",
    )
    options = parser.parse_args(argv)
    prompts = options.prompts.read_text("utf-8").splitlines() if options.prompts else PROMPTS
    prompts = [prompt for prompt in prompts if prompt.strip()]
    graph = load(options.pipeline, options.stage, [options.model] if options.model else [])
    params = {name: json.loads(value) for name, _, value in (each.partition("=") for each in options.set)}
    pairs = asyncio.run(
        observe(graph, [prompts[i % len(prompts)] for i in range(options.count)], params, options.device)
    )
    result = fit(pairs, options.degree)
    print(json.dumps(result))
    print(f"cache_coefficients: {json.dumps(result['coefficients'])}", file=sys.stderr)
    return 0


Pairs = list[tuple[float, float]]


def fit(pairs: Pairs, degree: int) -> dict[str, Any]:
    """The polynomial with the least squares, and how good it is.

    Raises ValueError for fewer pairs than the polynomial has coefficients.
    """
    if len(pairs) <= degree:
        raise ValueError(f"{len(pairs)} pairs of steps are too few for a polynomial of degree {degree}")
    seen, added = np.array(pairs).T
    coefficients = np.polyfit(seen, added, degree)
    left = added - np.polyval(coefficients, seen)
    return {
        "coefficients": [float(f"{each:.9g}") for each in coefficients],
        "pairs": len(pairs),
        "modulated_change": [float(seen.min()), float(np.median(seen)), float(seen.max())],
        "added_change": [float(added.min()), float(np.median(added)), float(added.max())],
        "r_squared": float(1 - left.var() / added.var()),
    }


class Observer:
    """In the place of a cache: everything runs, and changes from step to step are noted."""

    def __init__(self, denoiser: Any) -> None:
        from workers.engines.diffusion.caches.blocks import Blocks

        self.pairs: Pairs = []
        self._denoiser = denoiser
        self._blocks = Blocks(denoiser.transformers)
        self._before: dict[Row, tuple[int, Any, Any]] = {}
        self._now: tuple[int, Any, Any]

    def enter(self, transformer: int, modulated: torch.Tensor) -> None:
        """Keeps it."""
        self._now = (transformer, modulated, None)

    def leave(self, transformer: int, added: torch.Tensor) -> None:
        """Keeps it too."""
        self._now = (transformer, self._now[1], added)

    def state(self, row: Row) -> Payload:
        """Nothing that a checkpoint would need."""
        return {}

    def restore(self, row: Row, state: Payload) -> None:
        """There is no checkpoint."""

    def forget(self, row: Row) -> None:
        """Its picture is done."""
        self._before.pop(row, None)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """As the denoiser's."""
        from workers.engines.diffusion.caches.teacache import relative_change

        with self._blocks.heard_by(self):
            said: torch.Tensor = self._denoiser.forward(rows)
        transformer, all_modulated, all_added = self._now
        for row, modulated, added in zip(rows, all_modulated.split(1), all_added.split(1), strict=True):
            before = self._before.get(row)
            if before is not None and before[0] == transformer:
                changes = [relative_change(*pair) for pair in ((before[1], modulated), (before[2], added))]
                self.pairs.append((float(changes[0]), float(changes[1])))
            self._before[row] = (transformer, modulated, added)
        return said


async def observe(graph: Pipeline, prompts: Sequence[str], params: dict[str, Any], device: str) -> Pairs:
    """Paints with a pipeline's stages in this process; the pairs of changes in its denoiser's steps."""
    names = [name for name, stage in graph.stages.items() if stage.engine == "diffusion"]
    if len(names) != 1:
        raise ValueError(f"{graph.name} has {len(names)} denoisers; one is expected")
    (denoiser,) = names
    async with inside(graph, denoiser, device=device) as stages:
        runner = stages.engines[denoiser].thread.runner
        observer = Observer(runner.denoiser)
        runner.passes = Passes(runner.denoiser, graph.stages[denoiser].batch.max_batch_size, cache=observer)
        for number, prompt in enumerate(prompts):
            made = await stages.before(denoiser, {"prompt": prompt}, params, number)
            await stages.stage(denoiser, made, params, number)
            print(f"{number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return observer.pairs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
