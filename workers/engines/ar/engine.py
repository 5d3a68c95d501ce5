"""Engine ``ar``: autoregressive stages that stock vLLM can't run, on transformers' own modules.

What a resumed job guarantees: the tokens that are already out stay, and the rest is what the undisturbed run
would have made, greedy or sampled, up to the rounding of rows that are read in one pass and not one by one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from adapters.chunk import Payload
from pipelines import models
from pipelines.graph import Stage
from pipelines.options import ArOptions, options_of
from workers.engine import ItemError, Job
from workers.engines.answers import SamplingParams
from workers.engines.ar.blocks import Blocks
from workers.engines.ar.family import Model, Work
from workers.engines.ar.sampling import COLDEST
from workers.engines.ar.schedule import Scheduler
from workers.engines.ar.sequence import Choice, Sequence
from workers.engines.ar.thread import ArThread
from workers.families.find import find_class
from workers.optional import library
from workers.params import checked

#: Rows of a streaming edge that a job reads ahead of its tokens.
ROWS_AHEAD = 64

log = logging.getLogger("engine")


class ArEngine:
    """Runs a model file (:mod:`workers.engines.ar.family`); what payloads are is the model's affair."""

    resumes = True

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.options = options_of(stage, ArOptions)
        self.stage = stage
        self.device = device
        self.thread = ArThread(self._build, stage.batch.wait_ms / 1e3)

    async def start(self) -> None:
        """Loads the model. Raises MissingLibrary, ModelError, ValueError, or what the model file raises."""
        began = time.monotonic()
        await self.thread.start()
        self.model.call = self.thread.call
        log.info(
            "ar is ready: model %s, %s, context %d, memory for %d rows, %.1f s",
            self.stage.model,
            str(self.model.layout.dtype).removeprefix("torch."),
            self.context,
            self.thread.scheduler.blocks.total * self.options.block_size,
            time.monotonic() - began,
        )

    async def stop(self) -> None:
        """Ends the thread; the model goes with this object."""
        await self.thread.stop()

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Makes one job's tokens, or those that an earlier attempt did not get out."""
        work = await self.model.begin(job)
        if work is None:
            return
        sequence = self._sequence(job, work)
        hungry = asyncio.Event()
        feeding = asyncio.ensure_future(self._feed(sequence, work, hungry))
        self.thread.add(sequence)
        try:
            while True:
                step = await sequence.sink.get()
                if isinstance(step, Exception):
                    raise step
                payload = work.output.push(step)
                if payload is not None:
                    yield payload
                if step.finish is not None or work.output.stopped:
                    return
                self.thread.took(sequence)
                hungry.set()
        finally:
            self.thread.remove(sequence)
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding

    def _sequence(self, job: Job, work: Work) -> Sequence:
        """Raises ItemError (400) for a job that can't fit."""
        prompt, written = work.prompt, len(work.written)
        params = checked(work.params, SamplingParams)
        room = self.context - prompt.rows
        if room < 1:
            raise ItemError(
                f"messages: the prompt has {prompt.rows} tokens, and the context of {self.context} "
                "must hold the answer as well",
                status=400,
                param="messages",
            )
        if prompt.rows + written > self.context:  # it would wait for ever, and those behind it
            raise ItemError(
                f"the answer was begun where there is more memory: with its prompt it has "
                f"{prompt.rows + written} tokens, and the context here is {self.context}"
            )
        choice = {**_NEUTRAL, **self.model.defaults, **_said(self.options.sampling), **_said(params)}
        limit = min(params.max_tokens or self.options.max_tokens or choice.get("max_tokens") or room, room)
        if params.min_tokens > limit:
            raise ItemError(
                f"min_tokens: {params.min_tokens} is more than the {limit} that there may be",
                status=400,
                param="min_tokens",
            )
        return Sequence(
            job.name,
            prompt,
            Choice(
                job.seed,
                choice["temperature"] if choice["temperature"] >= COLDEST else 0.0,
                max(0, choice["top_k"]),
                choice["top_p"],
                choice["repetition_penalty"],
                params.min_tokens,
                params.ignore_eos,
            ),
            max(limit, written + 1),
            written=work.written,
            streamed=work.rows is not None,
            rest=work.rest,
        )

    async def _feed(self, sequence: Sequence, work: Work, hungry: asyncio.Event) -> None:
        """Hands a streaming edge's rows to the thread, not much further than the job has come."""
        if work.rows is None:
            return
        fed = 0
        try:
            async for block in work.rows:
                rows = list(block)
                fed += len(rows)
                self.thread.feed(sequence, rows, ended=False)
                while fed - sequence.made - len(work.written) >= ROWS_AHEAD:
                    hungry.clear()
                    await hungry.wait()
            if work.rest is None:
                raise RuntimeError("the rows have ended, and there is none for further tokens")
            self.thread.feed(sequence, [], ended=True)
        except Exception as error:
            sequence.sink.put_nowait(error)

    # --- on the thread

    def _build(self) -> tuple[Any, Scheduler]:
        folder = models.ensure(self.stage.model or "")
        if folder.is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # Waiting threads that spin take the cores from the other stages of the pipeline.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        torch = library("torch", "cpu")
        library("transformers", "cpu")
        from workers.engines.ar.runner import Runner, capture_sizes, fitting_blocks, pool_blocks

        device = torch.device(self.device)
        if device.type == "cuda" and device.index is not None:
            # Streams and captures are the thread's current device's: a graph of another one would be empty,
            # and its replays would change nothing.
            torch.cuda.set_device(device)
        options, seqs = self.options, self.stage.batch.max_num_seqs
        if options.max_num_batched_tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens: {options.max_num_batched_tokens} rows hold no step of "
                f"{seqs} jobs (max_num_seqs)"
            )
        self.model = model_class(options.family)(folder, options, device)
        self.model.hidden_layers = sorted({*self.model.hidden_layers, *options.hidden_layers})
        if any(layer > self.model.layout.layers for layer in self.model.hidden_layers):
            raise ValueError(
                f"hidden_layers: {self.model.hidden_layers}, but there are {self.model.layout.layers}"
            )
        blocks = Blocks(pool_blocks(self.model, options.kv_cache_gib, options.block_size), options.block_size)
        self.context = min(options.max_model_len or self.model.max_positions, blocks.total * blocks.size)
        captured = self.device.startswith("cuda") and not options.enforce_eager
        sizes = capture_sizes(seqs) if captured else []
        kept = fitting_blocks(self.model, options.prefix_cache_gib, options.block_size)
        runner = Runner(self.model, blocks, sizes, self.stage.resources.threads, kept)
        return runner, Scheduler(
            blocks,
            seqs,
            options.max_num_batched_tokens,
            restore=runner.prefixes.restore if runner.prefixes else None,
            wipe=runner.pages.wipe,
            coming=runner.prefixes.coming if runner.prefixes else None,
        )


_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def _said(wishes: Any) -> dict[str, Any]:
    return {name: value for name in _NEUTRAL if (value := getattr(wishes, name)) is not None}


def model_class(name: str) -> type[Model]:
    """The class that "package.module:Class" names. Raises ValueError."""
    found = find_class(name)
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise ValueError(f"options.family: {name!r} is no {Model.__module__}.Model")
    return found
