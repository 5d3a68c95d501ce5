"""`painter` as three stages against a plain loop over diffusers' parts in one process: pictures at once.

Both sides have the same weights, seeds, steps and guidance, and all cores. The served side is `omni-broker
start` and POST /v1/images/generations. The loop paints the same requests as one batch (``baseline_...``, the
equal batch) and one after the other (``single_...``); rounds of both sides alternate. Pictures of both are
compared.

teacache_speedup is a second server's with --enable-teacache; adherence is the share of held-out prompts whose
pictures the drawing rules find right (shape, colour, place and background), and its drop is in points.
cfg_parallel_speedup is the denoiser's alone, in this process and one beside it, one thread each, over
cfg: sequential with one thread; denoiser_thread_s_per_image is what the first one's thread computes, whatever
else runs on the machine. late_join_wait_steps is how many steps a request that comes while another is
painted waits for its first one, the step in hand included. cpu_s_per_image is processor time of all engines.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from numpy.typing import NDArray

from pipelines.graph import Pipeline
from pipelines.loader import load
from scripts.benchmarks.common import Report, median_ms, quantile
from scripts.benchmarks.house import House, house, message_of, told
from scripts.inside import Inside, inside
from scripts.painter.evaluation import figures
from scripts.painter.prompts import Prompt, evaluation
from workers.families.painter.wishes import GUIDANCE, STEPS

PACKAGES = ("torch", "diffusers", "transformers")
DENOISER = "denoiser"

Picture = NDArray[np.uint8]


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=16, help="all at once (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (default 5)")
    parser.add_argument("--prompts", type=int, default=100, help="for the adherence (default 100)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each picture (default {STEPS})")
    parser.add_argument("--pipeline", default="painter", help="painter, or a file with its stages")
    parser.add_argument("--random", action="store_true", help="random weights; says nothing of adherence")
    parser.add_argument("--stage", action="append", default=[], metavar="SETTING", help="as start takes it")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda:0, of both sides")
    options = parser.parse_args(argv)
    report = Report("images", argv, packages=PACKAGES)
    with tempfile.TemporaryDirectory(prefix="omni-bench-weights-") as folder:
        if options.random:
            random_weights(Path(folder))
            options.stage = [*(f"{name}.model={folder}" for name in (DENOISER, "vae")), *options.stage]
        results = asyncio.run(measure(options, report))
    figures_of = {name: value for name, value in results.items() if not isinstance(value, dict)}
    report.table(
        "Pictures at once",
        [{"figure": name, "value": "-" if value is None else value} for name, value in figures_of.items()],
    )
    report.finish(results)


class Round(NamedTuple):
    """One run of all requests at once."""

    seconds: float
    cpu_s: dict[str, float]  #: of each stage's engines, and of "rank", the second process of one
    ends: list[float]  #: seconds until each picture was there
    pictures: list[Picture]


async def measure(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """All of it."""
    settings = [f"{name}.devices={options.device}" for name in ("thinker", DENOISER, "vae")]
    if options.device != "cpu":  # all requests in one pass
        rows, seqs = 2 * options.requests, options.requests
        settings += [
            f"{DENOISER}.replicas=1",
            f"{DENOISER}.max_num_seqs={seqs}",
            f"{DENOISER}.max_batch_size={rows}",
        ]
    options.stage = [*settings, *options.stage]
    graph = load(options.pipeline, options.stage)
    baseline = Baseline(graph, options)
    prompts = evaluation(options.requests)
    report.say("the server and the plain loop in turn")
    async with served(options, []) as server:
        rounds, batches, singles = [], [], []
        for _ in range(options.rounds):
            rounds.append(await server.round(prompts))
            batches.append(await asyncio.to_thread(baseline.batch, prompts))
            singles.append(await asyncio.to_thread(baseline.single, prompts))
        alone = [await server.timed(prompts[0], 0) for _ in range(options.rounds + 2)][2:]
        judged = await server.judged(options)
    apart = max(
        np.abs(a.astype(int) - b).max() for a, b in zip(rounds[0].pictures, batches[0][1], strict=True)
    )
    seconds = middle([each.seconds for each in rounds])
    batch_s, single_s = middle([each[0] for each in batches]), middle([s for each in singles for s in each])
    results = {
        "requests": options.requests,
        "steps": options.steps,
        "images_per_s": options.requests / seconds,
        "baseline_images_per_s": options.requests / batch_s,
        "speedup": batch_s / seconds,
        "single_images_per_s": 1 / single_s,
        "speedup_over_single": single_s * options.requests / seconds,
        "p50_s": quantile([end for each in rounds for end in each.ends], 0.5),
        "latency_added_ms": median_ms(alone) - single_s * 1e3,
        "cpu_s_per_image": middle([sum(each.cpu_s.values()) for each in rounds]) / options.requests,
        "stages_cpu_s_per_image": {
            stage: middle([each.cpu_s[stage] for each in rounds]) / options.requests
            for stage in rounds[0].cpu_s
        },
        "baseline_cpu_s_per_image": middle([each[2] for each in batches]) / options.requests,
        "largest_difference": int(apart),
    }
    report.say("the server with TeaCache")
    results |= await with_teacache(options, prompts, seconds, judged)
    report.say("the denoiser alone")
    results |= await denoiser_alone(options, prompts, report)
    return results


def middle(values: Sequence[float]) -> float:
    """The median."""
    return quantile(values, 0.5)


# --- the served side


@asynccontextmanager
async def served(options: argparse.Namespace, more: list[str]) -> AsyncIterator[Server]:
    """A server that has painted all requests once."""
    command = [*told([options.pipeline], options.stage), *more]
    async with house(command) as home, aiohttp.ClientSession() as session:
        server = Server(home, session, options)
        await server.round(evaluation(options.requests))
        yield server


class Server:
    """Asks a house for pictures."""

    def __init__(self, home: House, session: aiohttp.ClientSession, options: argparse.Namespace) -> None:
        self._home = home
        self._session = session
        self._options = options

    async def paint(self, prompt: Prompt, seed: int) -> Picture:
        """One picture. Raises RuntimeError for an error."""
        from PIL import Image

        body = {
            "model": "painter",
            "prompt": prompt.text,
            "seed": seed,
            "num_inference_steps": self._options.steps,
        }
        async with self._session.post(f"{self._home.url}/v1/images/generations", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(message_of(await answer.text()))
            made = await answer.json()
        return np.asarray(
            Image.open(io.BytesIO(base64.b64decode(made["data"][0]["b64_json"]))).convert("RGB")
        )

    async def timed(self, prompt: Prompt, seed: int) -> float:
        """Seconds of one picture alone."""
        began = time.perf_counter()
        await self.paint(prompt, seed)
        return time.perf_counter() - began

    async def round(self, prompts: Sequence[Prompt], first_seed: int = 0) -> Round:
        """All at once."""
        before, began = self._cpu_s(), time.perf_counter()

        async def one(number: int) -> tuple[float, Picture]:
            picture = await self.paint(prompts[number], first_seed + number)
            return time.perf_counter() - began, picture

        made = await asyncio.gather(*(one(number) for number in range(len(prompts))))
        seconds = time.perf_counter() - began
        used = {stage: after - before.get(stage, 0.0) for stage, after in self._cpu_s().items()}
        return Round(seconds, used, [end for end, _ in made], [each for _, each in made])

    async def judged(self, options: argparse.Namespace) -> float | None:
        """The share of held-out prompts whose pictures are right; None with random weights."""
        if options.random or not options.prompts:
            return None
        prompts, pictures = evaluation(options.prompts), []
        for first in range(0, len(prompts), options.requests):
            pictures += (await self.round(prompts[first : first + options.requests], first)).pictures
        return float(figures(prompts, np.stack(pictures))["right"])

    def _cpu_s(self) -> dict[str, float]:
        used: dict[str, float] = {}
        for process in self._home.processes():
            if process.role in ("engine", "rank"):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                stage = process.stage.partition("/")[2] or process.role
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                used[stage] = used.get(stage, 0.0) + seconds
        return used


async def with_teacache(
    options: argparse.Namespace, prompts: Sequence[Prompt], plain_s: float, plain: float | None
) -> dict[str, Any]:
    """The same server with TeaCache, if the pipeline has coefficients."""
    stage = load(options.pipeline, options.stage).stages[DENOISER]
    if not stage.options.get("cache_coefficients"):
        return {"teacache_speedup": None, "teacache_adherence_drop": None}
    async with served(options, ["--enable-teacache"]) as server:
        seconds = middle([(await server.round(prompts)).seconds for _ in range(options.rounds)])
        right = await server.judged(options)
    drop = None if plain is None or right is None else 100 * (plain - right)
    return {
        "teacache_threshold": stage.options.get("cache_threshold", 0.25),
        "teacache_speedup": plain_s / seconds,
        "adherence": plain,
        "teacache_adherence_drop": drop,
    }


# --- the denoiser alone


async def denoiser_alone(
    options: argparse.Namespace, prompts: Sequence[Prompt], report: Report
) -> dict[str, Any]:
    """How guidance in parallel pays, and how long a late request waits."""
    rates, thread_s = {}, {}
    for cfg in ("sequential", "batched", "parallel"):
        graph = load(options.pipeline, [*options.stage, f"{DENOISER}.cfg={cfg}", f"{DENOISER}.threads=1"])
        async with inside(graph, DENOISER, device=options.device) as stages:
            await denoised(stages, options, prompts[:2])
            seconds = [await denoised(stages, options, prompts) for _ in range(options.rounds)]
            rates[cfg] = options.requests / middle([each for each, _ in seconds])
            thread_s[cfg] = middle([each for _, each in seconds]) / options.requests
            if cfg == "batched":
                waited = [await late(stages, options, prompts) for _ in range(3)]
    report.table("The denoiser's pictures per second, one thread each", [rates])
    return {
        "denoiser_images_per_s": rates,
        "denoiser_thread_s_per_image": thread_s,
        "cfg_parallel_speedup": rates["parallel"] / rates["sequential"],
        "cfg_parallel_speedup_over_batched": rates["parallel"] / rates["batched"],
        "late_join_wait_steps": max(waited),
    }


async def denoised(
    stages: Inside, options: argparse.Namespace, prompts: Sequence[Prompt]
) -> tuple[float, float]:
    """Seconds for all latents, at once; and processor seconds of the engine's thread, whatever else runs."""
    runner = stages.engines[DENOISER].thread.runner
    used = [0.0]
    take = runner.step

    def step(paintings: Any) -> Any:
        began = time.thread_time()
        outcome = take(paintings)
        used[0] += time.thread_time() - began
        return outcome

    params = {"num_inference_steps": options.steps}
    made = [await stages.before(DENOISER, {"prompt": prompt.text}, params, 0) for prompt in prompts]
    runner.step = step
    try:
        began = time.perf_counter()
        await asyncio.gather(*(stages.stage(DENOISER, each, params, seed) for seed, each in enumerate(made)))
        return time.perf_counter() - began, used[0]
    finally:
        del runner.step


async def late(stages: Inside, options: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    """Steps that a request waits for which comes while another is at its tenth: 1 is the step in hand."""
    thread = stages.engines[DENOISER].thread
    runner = thread.runner
    loop, began = asyncio.get_running_loop(), asyncio.Event()
    joined: list[int] = []
    take = runner.step

    def step(paintings: Any) -> Any:
        if runner.steps == first + 10:
            loop.call_soon_threadsafe(began.set)
        if len(paintings) > 1 and not joined:
            joined.append(runner.steps)
        return take(paintings)

    params = {"num_inference_steps": 60}
    made = [await stages.before(DENOISER, {"prompt": each.text}, params, 0) for each in prompts[:2]]
    first = runner.steps
    runner.step = step
    try:
        early = asyncio.ensure_future(stages.stage(DENOISER, made[0], params, 0))
        await began.wait()
        came = runner.steps  # the number of the step in hand
        await stages.stage(DENOISER, made[1], {"num_inference_steps": 1}, 1)
        await early
    finally:
        del runner.step
    return int(joined[0] - came)


# --- the baseline


class Baseline:
    """The plain loop, with all cores."""

    def __init__(self, graph: Pipeline, options: argparse.Namespace) -> None:
        import msgspec
        import torch
        import transformers

        from scripts.painter.painting import Plain
        from workers.families.painter.text import TextOptions

        transformers.logging.set_verbosity_error()  # of layers that are left out on purpose
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._threads = torch.get_num_threads()
        thinker, denoiser = graph.stages["thinker"], graph.stages[DENOISER]
        asked = msgspec.convert(thinker.options.get("family_options", {}), TextOptions)
        self._plain = Plain.load(
            Path(denoiser.model or ""), thinker.model or "", asked.layers, asked.max_tokens, options.device
        )
        self._steps = options.steps
        self._plain.paint(["a cup"] * options.requests, range(options.requests), 2)

    def batch(self, prompts: Sequence[Prompt]) -> tuple[float, Picture, float]:
        """Seconds of all as one batch, the pictures, and processor seconds."""
        import torch

        torch.set_num_threads(self._threads)  # engines in this process may have set another number
        began, cpu = time.perf_counter(), time.process_time()
        pictures = self._plain.paint([p.text for p in prompts], range(len(prompts)), self._steps, GUIDANCE)
        return time.perf_counter() - began, pictures, time.process_time() - cpu

    def single(self, prompts: Sequence[Prompt]) -> list[float]:
        """Seconds of each, one after the other."""
        return [self.batch([prompt])[0] for prompt in prompts]


def random_weights(folder: Path) -> None:
    """The painter's modules as they are before the training, in diffusers' layout."""
    import torch
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    from scripts.painter.export import export
    from scripts.painter.settings import Settings

    torch.manual_seed(1)
    settings = Settings()
    # SmolLM2's rows are 576 wide.
    transformer = SD3Transformer2DModel(**settings.transformer(576))
    export(folder, settings, transformer, AutoencoderKL(**settings.vae, shift_factor=0.0))
