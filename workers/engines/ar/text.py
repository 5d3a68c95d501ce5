"""Plain text models for the engine ``ar``: whatever transformers' AutoModelForCausalLM loads.

Also the example of a model file. Its payloads are those of the engine ``vllm``; with ``hidden_layers``, each
brings the rows that belong to it, too.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import Job
from workers.engines.answers import TextAnswer, TextParams, conversation
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.engines.prompt import Prompts
from workers.params import checked


class TextModel(Model):
    """A decoder with a token embedding and a head."""

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = dtype_of(options, device)
        causal = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        use_pages(causal)
        self.decoder = causal.get_decoder()
        self._embedding = causal.get_input_embeddings()
        self._head = causal.get_output_embeddings()
        self.layout = Layout.of(self.decoder.config, causal.dtype)
        self.max_positions = self.decoder.config.max_position_embeddings
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._backend = tokenizer.backend_tokenizer
        self._prompts = Prompts(tokenizer, options.system_prompt)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        generation = causal.generation_config
        self.stop_ids = sorted({*_ids(generation.eos_token_id), *_ids(tokenizer.eos_token_id)})
        self.suppressed_ids = generation.suppress_tokens or ()
        self.defaults = sampling_defaults(generation)

    async def begin(self, job: Job) -> Work | None:
        """The conversation as tokens."""
        params = checked(job.params, TextParams)
        request, heard = await conversation(job)
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._tokenizing, self._prompts.encode, request, heard)
        answer = TextAnswer(self._backend, ids, params, job.resumed)
        if answer.ended:
            return None
        return Work(
            Prompt(ids), TextOutput(answer), job.params, written=[[token] for token in answer.written]
        )

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[B, 1] -> [B, hidden]"""
        embedded: torch.Tensor = self._embedding(codes[:, 0])
        return embedded

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, vocab]"""
        scores: torch.Tensor = self._head(last)
        return scores


class TextOutput:
    """Payloads of text, with "hidden" float [k, layers, hidden] where layers are wanted.

    The rows of a payload are those that its tokens came from: in the first one the whole prompt's, and then
    one for each earlier token. They are handed on with the text, or by themselves while text is held back.
    """

    def __init__(self, answer: TextAnswer) -> None:
        self.answer = answer

    @property
    def stopped(self) -> bool:
        """A stop string was complete."""
        return self.answer.ended

    def push(self, step: Step) -> Payload | None:
        """One token."""
        payload = self.answer.push([step.token], step.finish)
        if step.hidden:
            rows = torch.stack([step.hidden[layer] for layer in sorted(step.hidden)], 1)
            payload = (payload or {"text": "", "token_ids": self.answer.take()}) | {"hidden": rows}
        return payload


def dtype_of(options: ArOptions, device: torch.device) -> torch.dtype | str:
    """The option as transformers takes it: float32 on a CPU, else what the checkpoint has."""
    if options.dtype != "auto":
        chosen: torch.dtype = getattr(torch, options.dtype)
        return chosen
    return torch.float32 if device.type == "cpu" else "auto"


def sampling_defaults(generation: Any) -> dict[str, Any]:
    """What a checkpoint's generation config says of sampling; as vLLM reads it, no ``do_sample`` needed."""
    wanted = ("temperature", "top_k", "top_p", "repetition_penalty")
    said = {name: getattr(generation, name, None) for name in wanted}
    return {name: value for name, value in said.items() if value is not None}


def _ids(token: int | list[int] | None) -> list[int]:
    if token is None:
        return []
    return [token] if isinstance(token, int) else token
