"""Qwen2.5-Omni's thinker for the engine ``ar``: conversations in, text and what the talker needs out."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import Job
from workers.engines.answers import TextAnswer, TextParams
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.families.conversation import Conversations
from workers.families.qwen2_5_omni.placement import Encoded, Rows, Settings
from workers.families.sampling import sampling_defaults
from workers.families.weights import Checkpoint
from workers.params import checked

TALKER = "talker"  #: the stage that wants rows


class Thinker(Model):
    """The language model. Its payloads are those of the engine ``vllm``, with rows for a talker besides.

    A talker's row is a token's input and its last hidden state, added up; of media only the latter. In the
    first payload these are the rows of the prompt, with "positions" int [3, n] and "next_position"; in each
    later one the row of the token before the payload's own.
    """

    axes = 3

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

        checkpoint = Checkpoint(str(folder))
        config = checkpoint.config.thinker_config
        text = config.text_config
        dtype = checkpoint.dtype(options.dtype, device.type)
        place = {"device": str(device), "dtype": dtype}
        self.decoder = checkpoint.part(
            lambda: modeling.Qwen2_5OmniThinkerTextModel(text), "thinker.model.", **place
        )
        use_pages(self.decoder)
        self._head = checkpoint.part(
            lambda: torch.nn.Linear(text.hidden_size, text.vocab_size, bias=False),
            "thinker.lm_head.",
            **place,
        )
        self.layout = Layout.of(text, dtype)
        self.max_positions = text.max_position_embeddings
        self.hidden_layers = (0, text.num_hidden_layers)
        self._settings = Settings.of(config)
        self._conversations = Conversations(checkpoint.folder, options.system_prompt, self._settings.pads)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        said = checkpoint.generation
        ends = said.get("eos_token_id") or []
        self.stop_ids = sorted(
            {self._conversations.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        )
        self.defaults = {"max_tokens": 1024, **sampling_defaults(said, "thinker", said)}

    async def begin(self, job: Job) -> Work | None:
        """The conversation as rows: text as the model embeds it, media as the encoder did."""
        params = checked(job.params, TextParams)
        request, encoded = await _inputs(job)
        loop = asyncio.get_running_loop()
        ids, media = await loop.run_in_executor(self._tokenizing, self._conversations.encode, request)
        rows = Rows(self._settings, ids, media, encoded)
        answer = TextAnswer(self._conversations.tokenizer.backend_tokenizer, rows.ids, params, job.resumed)
        if answer.ended:
            return None
        prompt = Prompt(
            rows.ids,
            await self.call(self._embedded, rows, encoded),
            torch.from_numpy(rows.positions),
            rows.next_position,
        )
        output = ThinkerOutput(answer, rows, spoken=TALKER in job.consumers)
        return Work(prompt, output, job.params, written=[[token] for token in answer.written])

    def _embedded(self, rows: Rows, encoded: Encoded) -> torch.Tensor:
        """[n, hidden]"""
        embeds: torch.Tensor = self.decoder.embed_tokens(torch.tensor(rows.ids, device=self.device))
        for part in rows.placed:
            made = torch.as_tensor(encoded[part.kind, part.number]["embeds"])[part.start : part.stop]
            embeds[part.at : part.at + len(made)] = made.to(embeds)
        return embeds

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[B, 1] -> [B, hidden]"""
        embedded: torch.Tensor = self.decoder.embed_tokens(codes[:, 0])
        return embedded

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, vocab]"""
        scores: torch.Tensor = self._head(last)
        return scores


class ThinkerOutput:
    """Text, and where the answer is to be spoken, the talker's rows with each token."""

    def __init__(self, answer: TextAnswer, rows: Rows, *, spoken: bool) -> None:
        self._answer = answer
        self._rows = rows
        self._spoken = spoken

    @property
    def stopped(self) -> bool:
        """A stop string was complete."""
        return self._answer.ended

    def push(self, step: Step) -> Payload | None:
        """One token."""
        payload = self._answer.push([step.token], step.finish)
        if payload and "finish_reason" in payload:
            payload["prompt_tokens_details"] = self._details()
        if not self._spoken:
            return payload
        payload = payload or {"text": "", "token_ids": self._answer.take()}
        inputs, last = (step.hidden[layer] for layer in sorted(step.hidden))
        if len(inputs) < len(self._rows.ids):
            return payload | {"rows": inputs + last}
        inputs = inputs.clone()
        for part in self._rows.placed:
            inputs[part.at : part.at + part.stop - part.start] = 0
        return payload | {
            "rows": inputs + last,
            "positions": self._rows.positions,
            "next_position": self._rows.next_position,
        }

    def _details(self) -> dict[str, int]:
        media = {f"{kind}_tokens": self._rows.count(kind) for kind in ("audio", "image", "video")}
        return {"text_tokens": len(self._rows.ids) - sum(media.values()), **media}


async def _inputs(job: Job) -> tuple[Payload, Encoded]:
    """The request, and what the encoder made of its media."""
    request: Payload = {}
    encoded: dict[tuple[str, int], Payload] = {}
    for producer in job.inputs:
        for payload in await job.gather(producer):
            if "kind" in payload:
                encoded[payload["kind"], payload["index"]] = payload
            else:
                request = payload
    return request, encoded
