"""Engine ``vllm``: text, and what the model can see and hear, to text, with vLLM's continuous batching.

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
from typing import Any

from adapters.chunk import Payload
from pipelines.graph import Stage
from pipelines.options import VllmOptions, options_of
from workers.engine import ItemError, Job
from workers.engines.answers import TextAnswer, TextParams, conversation
from workers.engines.prompt import Prompts
from workers.engines.vllm_media import Media
from workers.engines.vllm_setup import build
from workers.engines.vllm_thread import VllmThread, refusals
from workers.params import checked

_SEEDS = 2**63 - 1  # vLLM's generators take a signed 64-bit integer; it has other plans for -1

log = logging.getLogger("engine")


class VllmEngine:
    """Conversations in, their answers out, piece by piece.

    A payload is {"text", "token_ids"}; the last one adds "finish_reason" ("stop" or "length"),
    "prompt_tokens" and "completion_tokens".

    With ``hidden_layers`` it has "hidden" too, float [k, layers, hidden] in the model's dtype: the rows, at
    these layers, of the tokens that the model has read up to this payload's last token and that no earlier
    payload had. So the first one has a row for each token of the prompt, and each new token comes with the
    row of the token before it, from which it was made; the last token of an answer has none.
    """

    resumes = True

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.options = options_of(stage, VllmOptions)
        self.model = stage.model
        self.vllm = VllmThread(lambda: build(stage, self.options, device), self.options.hidden_layers)
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
        self._media = Media(engine, self._prompts)
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
        inputs = await self._inputs(job)
        prompt = inputs["prompt_token_ids"]
        room = self._context - len(prompt)
        if room < 1:
            raise ItemError(
                f"messages: the prompt has {len(prompt)} tokens, and the context of {self._context} "
                "must hold the answer as well",
                status=400,
                param="messages",
            )
        limit = min(params.max_tokens or self.options.max_tokens or room, room)
        answer = TextAnswer(self._backend, prompt, params, job.resumed)
        if answer.ended:
            return
        if answer.count >= limit:
            yield answer.end("length")
            return
        sampling = self._sampling(params, job.seed, limit, answer.count)
        tokens = inputs["prompt_token_ids"] = prompt + answer.written
        rows_out = len(tokens) - 1 if answer.written else 0
        async with aclosing(self.vllm.generate(inputs, sampling, rows_out)) as deltas:
            async for ids, finish, hidden in deltas:
                payload = answer.push(ids, finish)
                if hidden is not None:  # rows wait for nothing, not even for a whole character
                    payload = (payload or {"text": "", "token_ids": answer.take()}) | {"hidden": hidden}
                if payload is not None:
                    yield payload
                if answer.ended:
                    return

    async def _inputs(self, job: Job) -> dict[str, Any]:
        request, heard = await conversation(job)
        loop = asyncio.get_running_loop()
        if self._media.wanted(request, heard):
            return await loop.run_in_executor(self._tokenizing, self._media.encode, request, heard)
        ids = await loop.run_in_executor(self._tokenizing, self._prompts.encode, request, heard)
        return {"type": "token", "prompt_token_ids": ids}

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
