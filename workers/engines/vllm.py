"""Engine ``vllm``: text to text, with vLLM's continuous batching.

What a resumed answer guarantees: the tokens that are already out stay, and the text goes on from the very
letter. The rest is what the undisturbed run would have written, greedy or sampled (a token's draw depends on
the seed and its place alone: :mod:`workers.engines.vllm_draws`), up to the rounding of a prompt that is read
in one pass and not token by token, which can only decide between two words that are equally likely.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import VllmOptions, options_of
from workers.engine import ItemError, Job
from workers.engines.detokenize import TextStream
from workers.engines.prompt import Prompts
from workers.engines.vllm_setup import build
from workers.engines.vllm_thread import VllmThread, refusals
from workers.params import checked

_SEEDS = 2**63 - 1  # vLLM's generators take a signed 64-bit integer; it has other plans for -1

log = logging.getLogger("engine")


class TextParams(msgspec.Struct, frozen=True):
    """A request's wishes. None: the model's own default (its generation config), else vLLM's."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    stop: list[Annotated[str, Meta(min_length=1)]] = []


class VllmEngine:
    """Conversations in, their answers out, piece by piece.

    A payload is {"text", "token_ids"}; the last one adds "finish_reason" ("stop" or "length"),
    "prompt_tokens" and "completion_tokens".
    """

    resumes = True

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.options = options_of(stage, VllmOptions)
        self.model = stage.model
        self.vllm = VllmThread(lambda: build(stage, self.options, device))
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def start(self) -> None:
        """Loads the model. Raises what :func:`workers.engines.vllm_setup.build` raises."""
        began = time.monotonic()
        await self.vllm.start()
        engine = self.vllm.engine
        config, cache = engine.model_config, engine.vllm_config.cache_config
        tokenizer = engine.get_tokenizer()
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"model {self.model}: its tokenizer has no fast (Rust) version, which vllm needs here"
            )
        self._backend = tokenizer.backend_tokenizer
        self._prompts = Prompts(tokenizer, self.options.system_prompt)
        self._context = int(config.max_model_len)
        self._defaults = dict(config.get_diff_sampling_param())
        self._defaults.pop("max_tokens", None)
        log.info(
            "vllm is ready: model %s, %s, context %d, KV cache for %d tokens, %.1f s",
            self.model,
            str(config.dtype).removeprefix("torch."),
            self._context,
            cache.num_gpu_blocks * cache.block_size,
            time.monotonic() - began,
        )

    async def stop(self) -> None:
        """Lets the model go."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        await self.vllm.stop()

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """Writes one answer, or the rest of one that an earlier attempt began."""
        params = checked(job.params, TextParams)
        prompt = await self._prompt(job)
        room = self._context - len(prompt)
        if room < 1:
            raise ItemError(
                f"messages: the prompt has {len(prompt)} tokens, and the context of {self._context} "
                "must hold the answer as well",
                status=400,
                param="messages",
            )
        limit = min(params.max_tokens or self.options.max_tokens or room, room)
        text = TextStream(self._backend, prompt, params.stop, params.min_tokens)
        written = [token for payload in job.resumed for token in payload["token_ids"]]
        text.push(written)  # is out already
        if job.resumed and job.resumed[-1].get("finish_reason"):
            return
        count = len(written)
        if count >= limit:
            yield {"text": text.finish(), "token_ids": []} | _end("length", len(prompt), count)
            return
        tokens: list[int] = []  # not out yet
        sampling = self._sampling(params, job.seed, limit, count)
        async with aclosing(self.vllm.generate(prompt + written, sampling)) as deltas:
            async for ids, finish in deltas:
                before = text.tokens
                piece = text.push(
                    ids[:-1] if finish == "stop" else ids
                )  # the token that says "stop" is no text
                new = ids[: text.tokens - before] if text.stopped else ids
                tokens += new
                count += len(new)
                reason = "stop" if text.stopped else finish
                if reason is not None:
                    piece += text.finish()
                    yield {"text": piece, "token_ids": tokens} | _end(reason, len(prompt), count)
                    return
                if piece:
                    yield {"text": piece, "token_ids": tokens}
                    tokens = []

    async def _prompt(self, job: Job) -> list[int]:
        request: Payload = {}
        transcripts: dict[int, str] = {}
        for producer in job.inputs:
            for payload in await job.gather(producer):
                if "index" in payload:
                    index = payload["index"]
                    transcripts[index] = transcripts.get(index, "") + payload["text"]
                else:
                    request = payload
        heard = {index: text.strip() for index, text in transcripts.items()}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, self._prompts.encode, request, heard)

    def _sampling(self, params: TextParams, seed: int, limit: int, written: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        chosen = {
            name: value
            for name in ("temperature", "top_p", "top_k", "repetition_penalty")
            if (value := getattr(params, name)) is not None
        }
        try:
            return SamplingParams(
                **{**self._defaults, **chosen},
                seed=seed & _SEEDS,
                max_tokens=limit - written,
                min_tokens=max(0, params.min_tokens - written),
                ignore_eos=params.ignore_eos,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
        except refusals() as error:
            raise ItemError(str(error), status=400) from error


def _end(reason: str, prompt: int, completion: int) -> Payload:
    return {"finish_reason": reason, "prompt_tokens": prompt, "completion_tokens": completion}
