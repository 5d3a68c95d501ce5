"""The stages of a picture pipeline as engines in this process, and diffusers' own pipeline beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.chunk import Payload
from pipelines.graph import REQUEST, Pipeline
from pipelines.loader import load
from pipelines.options import ENGINES
from tests.engines.helpers import started, stream
from workers.engine import Engine, Job
from workers.families.find import find_class
from workers.inputs import find_transfer

Array = np.ndarray[Any, Any]
#: A job's emitted payloads, and the checkpoints that it made.
Kept = list[Payload]


class Killed(Exception):
    """The attempt ends here."""


@dataclass
class Painted:
    """What the stages made of one request: stage's name -> its payloads, as its consumers see them."""

    made: dict[str, list[Payload]]

    @property
    def latents(self) -> Array:
        """The last ones that the denoiser gave, as the VAE gets them."""
        return np.asarray(self.made["denoiser"][-1]["latents"])

    @property
    def image(self) -> Array:
        """uint8 [H, W, 3]"""
        return np.asarray(self.made["vae"][-1]["image"])

    @property
    def frames(self) -> Array:
        """uint8 [F, H, W, 3]"""
        return np.asarray(self.made["vae"][-1]["frames"])

    @property
    def partials(self) -> list[Payload]:
        """The pictures on the way."""
        return [payload for payload in self.made["vae"] if "partial" in payload]


class Rig:
    """Started engines, and the graph between them."""

    def __init__(self, pipeline: Pipeline, engines: Mapping[str, Engine]) -> None:
        self.pipeline = pipeline
        self.engines = engines

    async def paint(
        self, request: Payload, *, seed: int = 1, has: Iterable[str] = (), **params: Any
    ) -> Painted:
        """Runs a request through all stages that it needs, one after the other; its last attempt for each.

        ``has``: "image" for requests with pictures, as the gateway says it of them.
        """
        made: dict[str, list[Payload]] = {REQUEST: [request]}
        for name in self.pipeline.needed(list(self.pipeline.outputs)[:1], {REQUEST}, set(has)):
            made[name] = await self.stage(name, made, seed, params)
        return Painted(made)

    async def stage(
        self, name: str, made: Mapping[str, list[Payload]], seed: int, params: dict[str, Any], **more: Any
    ) -> list[Payload]:
        """One stage by itself; ``more`` goes to its Job."""
        return [
            as_sent(payload)
            async for payload in self.engines[name].run(self.job(name, made, seed, params, **more))
        ]

    def job(
        self, name: str, made: Mapping[str, list[Payload]], seed: int, params: dict[str, Any], **more: Any
    ) -> Job:
        """A job with what the stage's producers made."""
        inputs: dict[str, Any] = {}
        for _, edge in self.pipeline.into(name):
            if edge.from_ in made:
                payloads: AsyncIterator[Payload] = stream(made[edge.from_])
                inputs[edge.from_] = find_transfer(edge.transfer)(payloads) if edge.transfer else payloads
        return Job(f"test/{name}/1", inputs, params, seed, **more)

    async def broken(
        self,
        name: str,
        made: Mapping[str, list[Payload]],
        seed: int,
        params: dict[str, Any],
        *,
        when: Callable[[Kept, Kept], bool],
    ) -> list[Payload]:
        """Two attempts of a stage. The first one ends as soon as ``when(emitted, checkpoints)`` says so.

        Returns what both gave, as the stage's consumers see it.
        """
        out: Kept = []
        states: Kept = []

        async def keep(state: Payload) -> None:
            states.append(as_sent(state))
            if when(out, states):
                raise Killed

        try:
            async for payload in self.engines[name].run(self.job(name, made, seed, params, checkpoint=keep)):
                out.append(as_sent(payload))
                if when(out, states):
                    raise Killed
        except Killed:
            out += await self.stage(
                name,
                made,
                seed,
                params,
                attempt=2,
                emitted=len(out),
                resume_state=states[-1] if states else None,
            )
        else:
            raise AssertionError("the first attempt came to its end")
        return out


@asynccontextmanager
async def running(
    pipeline: str | Path, model: str | Path, *settings: str, device: str = "cpu", stages: Sequence[str] = ()
) -> AsyncIterator[Rig]:
    """A rig of all stages, or of some. ``settings`` are those of ``--stage``: "denoiser.cfg=sequential"."""
    graph = load(pipeline, models=[str(model)])
    graph = load(pipeline, [*(f"{name}.threads=1" for name in graph.stages), *settings], [str(model)])
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in stages or graph.stages:
            stage = graph.stages[name]
            engine = find_class(ENGINES[stage.engine].implementation)(stage, device=device)
            engines[name] = await stack.enter_async_context(started(engine))
        yield Rig(graph, engines)


def as_sent(payload: Payload) -> Payload:
    """A payload as it comes out of shared memory: NumPy's read-only views, where NumPy knows the dtype."""
    return {name: _sent(value) for name, value in payload.items()}


def _sent(value: Any) -> Any:
    if isinstance(value, list):
        return [_sent(item) for item in value]
    if hasattr(value, "detach"):
        import torch

        if value.dtype == torch.bfloat16:
            return value.clone()
        value = value.numpy()
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.setflags(write=False)
    return value


@dataclass
class Reference:
    """What diffusers' own pipeline made of a request."""

    steps: list[Array]  #: its latents after each step, without the batch axis
    pixels: Array  #: floats from 0 to 1, [H, W, 3] or [F, H, W, 3]

    @property
    def latents(self) -> Array:
        """The last ones."""
        return self.steps[-1]


def reference(pipe: Any, *, seed: int = 1, **call: Any) -> Reference:
    """Runs a diffusers pipeline object with a seed."""
    import torch

    steps: list[Array] = []

    def keep(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        steps.append(kept["latents"][0].float().cpu().numpy().copy())
        return {}

    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.inference_mode():
        made = pipe(generator=generator, callback_on_step_end=keep, output_type="np", **call)
    pixels = made.frames if hasattr(made, "frames") else made.images
    return Reference(steps, np.asarray(pixels[0]))


def assert_same(painted: Painted, expected: Reference, *, latents: Array | None = None) -> None:
    """Latents differ by less than 1e-4, pixels by at most one level of 255.

    ``latents``: the reference's in the form that the VAE gets here, where diffusers has another.
    """
    wanted = expected.latents if latents is None else latents
    np.testing.assert_allclose(painted.latents, wanted, rtol=0, atol=1e-4)
    pixels = painted.frames if "frames" in painted.made["vae"][-1] else painted.image
    levels = np.round(np.clip(expected.pixels, 0, 1) * 255)
    assert pixels.shape == levels.shape
    assert np.abs(pixels.astype(np.int16) - levels).max() <= 1


async def at_once(*jobs: Any) -> list[Any]:
    """Runs coroutines together."""
    return list(await asyncio.gather(*jobs))
