"""Qwen2.5-Omni's talker for the engine ``ar``: the thinker's rows in, codes of sound out, 50 a second.

Its prompt is the thinker's, and two rows more: the voice's own token and the answer's first. Each code's
successor is computed from the code and the next row of the answer, so the talker follows the thinker by two
tokens; after the answer's end come a row that says so and then one of silence, over and over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import Job
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.families.qwen2_5_omni.speakers import Speakers
from workers.families.sampling import sampling_defaults
from workers.families.weights import Checkpoint
from workers.params import checked

#: The talker's defaults in transformers' ``generate``.
_SAMPLING = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "max_new_tokens": 4096,
}


class TalkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of its own."""

    #: Frames of one payload: fewer bring sound sooner where windows are short, and cost more messages
    frames: Annotated[int, Meta(ge=1, le=1024)] = 12


class VoiceParams(msgspec.Struct, frozen=True):
    """A request's wishes."""

    voice: str | None = None


class Talker(Model):
    """The speech model. Its payloads are {"frames": int [1, k], "codes": [[code], ...], "voice"}."""

    axes = 3
    stops_are_tokens = False

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

        checkpoint = Checkpoint(str(folder))
        self._settings = msgspec.convert(options.family_options, TalkerOptions)
        config = checkpoint.config.talker_config
        dtype = checkpoint.dtype(options.dtype, device.type)
        place = {"device": str(device), "dtype": dtype}
        self.decoder = checkpoint.part(
            lambda: modeling.Qwen2_5OmniTalkerModel(config), "talker.model.", **place
        )
        use_pages(self.decoder)
        self._in = checkpoint.part(
            lambda: torch.nn.Linear(config.embedding_size, config.hidden_size),
            "talker.thinker_to_talker_proj.",
            **place,
        )
        self._head = checkpoint.part(
            lambda: torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False),
            "talker.codec_head.",
            **place,
        )
        self.layout = Layout.of(config, dtype)
        self.max_positions = config.max_position_embeddings
        self.defaults = sampling_defaults(checkpoint.generation, "talker", _SAMPLING)
        self.stop_ids = [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
        known = checkpoint.config.token2wav_config.dit_config.num_embeds + 1
        unknown = set(range(known, config.vocab_size)) - set(self.stop_ids)  # code2wav could not read them
        self.suppressed_ids = sorted(unknown | {config.tts_codec_start_token_id})
        self._config = config
        self._speakers = Speakers(checkpoint.folder)
        self._read_texts(checkpoint, dtype)

    def _read_texts(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """The few rows of the thinker's embedding that are always the same."""
        config, speakers = self._config, self._speakers
        tokens = [config.tts_text_end_token_id, config.tts_text_pad_token_id]
        tokens += [speakers[name].bos_token for name in speakers.names]
        embedded = checkpoint.rows("thinker.model.embed_tokens.weight", tokens).to(self.device, dtype)
        self._text_end, self._text_pad = embedded[0], embedded[1]
        self._text_starts = dict(zip(speakers.names, embedded[2:], strict=True))

    async def begin(self, job: Job) -> Work | None:
        """The thinker's prompt and the first token of its answer; None for an answer without words."""
        voice = self._speakers.name(checked(job.params, VoiceParams).voice)
        payloads = _all(job)
        first = await anext(payloads, None)
        if first is None or (job.resumed and "finish_reason" in job.resumed[-1]):
            return None
        place = first["next_position"]
        positions = np.concatenate(
            [np.asarray(first["positions"]), np.full((3, 2), [[place, place + 1]], np.int64)], 1
        )
        count = positions.shape[1]
        config = self._config
        ids = [config.tts_codec_mask_token_id] * (count - 2)
        ids += [config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
        return Work(
            Prompt(
                ids,
                await self.call(self._embedded, first, voice),
                torch.from_numpy(positions),
                place + 2,
            ),
            TalkerOutput(self._settings.frames, voice),
            job.params,
            written=[frame for payload in job.resumed for frame in payload["codes"]],
            rows=self._rows(payloads),
            rest=self._text_pad,
        )

    def _embedded(self, first: Payload, voice: str) -> torch.Tensor:
        """The rows of the prompt, [n, hidden]."""
        config = self._config
        codes = torch.tensor(
            [config.tts_codec_pad_token_id, config.tts_codec_start_token_id], device=self.device
        )
        prompt = torch.as_tensor(first["prompt"]).to(self._text_pad)
        answer = torch.as_tensor(first["first"]).to(self._text_pad)
        last = torch.cat([self._text_starts[voice][None], answer]) + self.decoder.embed_tokens(codes)
        rows: torch.Tensor = self._in(torch.cat([prompt, last]))
        return rows

    async def _rows(self, payloads: AsyncIterator[Payload]) -> AsyncIterator[torch.Tensor]:
        async for payload in payloads:
            yield torch.as_tensor(payload["rows"])
        yield self._text_end[None]

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[B, 1] and [B, embedding] -> [B, hidden]"""
        embedded: torch.Tensor = self._in(self.decoder.embed_tokens(codes[:, 0]) + rows)
        return embedded

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, vocab]"""
        scores: torch.Tensor = self._head(last)
        return scores


class TalkerOutput:
    """Codes, some at a time."""

    stopped = False

    def __init__(self, frames: int, voice: str) -> None:
        self._frames = frames
        self._voice = voice
        self._codes: list[int] = []

    def push(self, step: Step) -> Payload | None:
        """One code; the one that says "stop" is none."""
        if step.finish != "stop":
            self._codes.append(step.token)
        if step.finish is None and len(self._codes) < self._frames:
            return None
        codes, self._codes = self._codes, []
        payload: dict[str, Any] = {
            "frames": np.array([codes], np.int64),
            "codes": [[code] for code in codes],
            "voice": self._voice,
        }
        return payload if step.finish is None else payload | {"finish_reason": step.finish}


async def _all(job: Job) -> AsyncIterator[Payload]:
    for stream in job.inputs.values():
        async for payload in stream:
            yield payload
