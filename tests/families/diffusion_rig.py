"""The stages of a picture pipeline as engines in this process, and diffusers' own pipeline beside them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
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

#: A request's payload, its parameters, its seed.
Asked = tuple[dict[str, Any], dict[str, Any], int]


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

    def looks_like(self, other: Painted) -> bool:
        """The same picture but for rounding, which other company in a batch changes, and a colour with it."""
        return int(np.abs(self.image.astype(int) - other.image).max()) <= 1

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
        when: Callable[[list[Payload], list[Payload]], bool],
    ) -> list[Payload]:
        """Two attempts of a denoiser. The first one ends after the step when ``when(emitted, checkpoints)``.

        Returns what both gave, as the stage's consumers see it.
        """
        out: list[Payload] = []
        states: list[Payload] = []

        async def keep(state: Payload) -> None:
            states.append(as_sent(state))

        async def attempt() -> None:
            job = self.job(name, made, seed, params, checkpoint=keep)
            async for payload in self.engines[name].run(job):
                out.append(as_sent(payload))  # noqa: PERF401 (it counts when the attempt is cut off)

        with self.gate(name) as gate:
            running = asyncio.ensure_future(attempt())
            while True:
                arrival = asyncio.ensure_future(gate.arrival())
                await asyncio.wait([running, arrival], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    arrival.cancel()
                    await running
                    raise AssertionError("the first attempt came to its end")
                if when(out, states):
                    break
                gate.open()
            running.cancel()
            await asyncio.wait([running])
        again = {"attempt": 2, "emitted": len(out), "resume_state": states[-1] if states else None}
        return out + await self.stage(name, made, seed, params, **again)

    @contextmanager
    def gate(self, name: str = "denoiser") -> Iterator[Gate]:
        """A denoiser waits before each step until it may take it."""
        runner: Any = self.engines[name].thread.runner  # type: ignore[attr-defined]
        gate = Gate(runner.step)
        runner.step = gate.step
        try:
            yield gate
        finally:
            del runner.step
            gate.open(1_000_000)


class Gate:
    """Where an engine's thread waits before each step. ``taken``: (job's name, its step) of all in each."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.taken: list[list[tuple[str, int]]] = []
        self._step = step
        self._permits = threading.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[None] = asyncio.Queue()

    def step(self, paintings: Any) -> Any:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._arrivals.put_nowait, None)
        self._permits.acquire()
        self.taken.append([(painting.name, painting.canvas.step) for painting in paintings])
        return self._step(paintings)

    async def arrival(self) -> None:
        """Waits until the thread stands here. What the step before gave has then been delivered."""
        await self._arrivals.get()

    def open(self, steps: int = 1) -> None:
        """Lets it take so many steps."""
        self._permits.release(steps)


@asynccontextmanager
async def running(
    pipeline: str | Path,
    model: str | Path | None,
    *settings: str,
    device: str = "cpu",
    stages: Sequence[str] = (),
) -> AsyncIterator[Rig]:
    """A rig of all stages, or of some. ``settings`` are those of ``--stage``: "denoiser.cfg=sequential".

    ``model``: of all stages; None: those that the pipeline names.
    """
    models = [] if model is None else [str(model)]
    graph = load(pipeline, models=models)
    graph = load(pipeline, [*(f"{name}.threads=1" for name in graph.stages), *settings], models)
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


async def painted_together(
    pipeline: str, model: Path, requests: Sequence[Asked], *settings: str
) -> list[Painted]:
    """Requests that come at once. The denoiser must have taken their steps together."""
    async with running(pipeline, model, *settings) as rig:
        painted = await at_once(
            *(rig.paint(request, seed=seed, **params) for request, params, seed in requests)
        )
        # Little more steps than the longest took.
        assert rig.engines["denoiser"].thread.runner.steps < sum(  # type: ignore[attr-defined]
            params["num_inference_steps"] for _, params, _ in requests
        )
    return painted


async def assert_resumes(pipeline: str, model: Path, asked: Asked, *, kill_after: int) -> None:
    """A denoiser that dies after so many checkpoints, one a step, goes on where it was.

    The request has two partial pictures.
    """
    request, params, seed = asked
    async with running(pipeline, model, "denoiser.checkpoint_steps=1") as rig:
        whole = await rig.paint(request, seed=seed, **params)
        runner = rig.engines["denoiser"].thread.runner  # type: ignore[attr-defined]
        before = runner.steps
        broken = await rig.broken(
            "denoiser", whole.made, seed, params, when=lambda _, states: len(states) == kill_after
        )
        taken = runner.steps - before
    assert taken <= params["num_inference_steps"] + 2, "no step twice, but for those under way at the death"
    assert [payload.get("partial") for payload in broken] == [0, 1, None]
    for one, other in zip(broken, whole.made["denoiser"], strict=True):
        np.testing.assert_array_equal(one["latents"], other["latents"])


def count_different(painted: Sequence[Painted]) -> int:
    """How many different pictures these are."""
    kinds: list[Painted] = []
    for one in painted:
        if not any(one.looks_like(other) for other in kinds):
            kinds.append(one)
    return len(kinds)
