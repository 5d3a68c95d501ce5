"""Qwen3-Omni's talker for the engine ``ar``: text, token by token, to frames of codes.

Its prompt is what users said (texts through one projection, what the thinker made of media through another)
and the first tokens of the answer, in one row each with the voice's control codes. Each further row is the
sum of the last frame's embeddings and of the next text token's; after the text's end come a row that says so
and, from then on, padding.

As with transformers, the last token of an answer (its end, or the one at the limit) is not spoken, and the
last frame before the limit is not heard.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import ItemError, Job
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.engines.ar.sampling import Draws
from workers.families.find import refuse
from workers.families.qwen3_omni.placement import Rules, Span
from workers.families.qwen3_omni.predictor import Predictor
from workers.families.qwen3_omni.speakers import Speakers
from workers.families.sampling import sampling_defaults
from workers.families.weights import Checkpoint
from workers.params import checked

#: Of transformers' ``generate``.
_SAMPLING = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "max_new_tokens": 4096,
}
_CONTROL_CODES = 1024  #: the vocabulary's last ones are no sound


class VoiceParams(msgspec.Struct, frozen=True):
    """A request's wishes."""

    voice: str | None = None


class Heard(NamedTuple):
    """What the thinker says of its prompt, see :meth:`workers.families.qwen3_omni.thinker.Thinker.begin`."""

    user_ids: list[int]
    spans: list[Span]
    hidden: torch.Tensor  #: [m, thinker's hidden]
    opening: list[int]  #: the answer's first four tokens, role included


class Talker(Model):
    """The mixture of experts that makes a frame's first code, and the predictor of the others."""

    axes = 3
    stops_are_tokens = False

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        refuse(options, "family_options", "hidden_layers", "system_prompt")
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        checkpoint = Checkpoint(str(folder))
        whole = checkpoint.config
        self._speakers = Speakers(whole, checkpoint.folder)
        config, reader = whole.talker_config, whole.thinker_config.text_config
        text = config.text_config
        place = {"device": str(device), "dtype": checkpoint.dtype(options.dtype, str(device))}
        self._talker = checkpoint.part(
            lambda: modeling.Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config),
            "talker.",
            **place,
        )
        self._words = checkpoint.part(
            lambda: torch.nn.Embedding(reader.vocab_size, reader.hidden_size),
            "thinker.model.embed_tokens.",
            **place,
        )
        self.decoder = use_pages(self._talker.model)
        self._predictor = Predictor(self._talker.code_predictor)
        self.layout = Layout.of(text, place["dtype"])
        self.max_positions = text.max_position_embeddings
        self.codebooks = config.num_code_groups
        self.stop_ids = [config.codec_eos_token_id]
        sounds = text.vocab_size - _CONTROL_CODES
        self.suppressed_ids = [n for n in range(sounds, text.vocab_size) if n != config.codec_eos_token_id]
        self.defaults = sampling_defaults(checkpoint.generation, "talker", _SAMPLING)
        self._rules = Rules(config, config.spatial_merge_size)
        self._codec = config
        self._marks = [whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id]

    async def begin(self, job: Job) -> Work | None:
        """Waits for the prompt and the answer's first word; speaks nothing where there is none.

        Payloads are {"frames": int32 [codebooks, 1], "codes": the same as lists, "voice"}, and at last
        {"finish_reason"}.
        """
        voice = self._speakers.name(checked(job.params, VoiceParams).voice)
        if job.resumed and "finish_reason" in job.resumed[-1]:
            return None
        (stream,) = job.inputs.values()
        heard = await first_of(stream)
        if heard is None:
            return None
        prompt, ending, rest = await self.call(self._prompt, heard, voice)
        return Work(
            prompt,
            TalkerOutput(voice),
            job.params,
            written=[frame for payload in job.resumed for frame in payload["codes"]],
            rows=self._rows(stream, ending),
            rest=rest,
        )

    async def _rows(
        self, stream: AsyncIterator[Payload], ending: torch.Tensor
    ) -> AsyncIterator[torch.Tensor]:
        """A row for each further token of the text, and one for its end."""
        async for payload in stream:
            if payload["spoken"]:
                yield await self.call(self._texts, payload["spoken"])
        yield ending[None]

    # --- on the engine's thread

    def _texts(self, ids: Sequence[int]) -> torch.Tensor:
        """Rows of text: [n, hidden]."""
        words = self._words(torch.tensor(ids, dtype=torch.long, device=self.device))
        rows: torch.Tensor = self._talker.text_projection(words)
        return rows

    def _prompt(self, heard: Heard, voice: str) -> tuple[Prompt, torch.Tensor, torch.Tensor]:
        """The prompt, the row that says that the text has ended, and that of padding."""
        begin, end, pad = self._texts(self._marks)
        users = self._users(heard)
        answer = self._texts(heard.opening)
        answer = torch.cat([answer[:3], pad.expand(4, -1), begin[None], answer[3:]])
        codec = self._codec
        controls = [
            codec.codec_nothink_id,
            codec.codec_think_bos_id,
            codec.codec_think_eos_id,
            self._speakers.token(voice),
            codec.codec_pad_id,
            codec.codec_bos_id,
        ]
        answer[3:] += self.decoder.codec_embedding(torch.tensor(controls, device=self.device))
        ids = [*heard.user_ids, *[self._marks[2]] * len(answer)]
        # transformers tells its thinker alone that a film's sound stands among its pictures; to the talker
        # they are one line of rows.
        spans = [Span(sound=self._rules.rows(span)) if span.in_film else span for span in heard.spans]
        positions = self._rules.positions(ids, spans)
        prompt = Prompt(
            (),  # the repetition penalty looks at codes alone
            embeds=torch.cat([users, answer]),
            positions=positions,
            next_position=float(positions.max()) + 1,
        )
        return prompt, end, pad

    def _users(self, heard: Heard) -> torch.Tensor:
        """Rows of all that users said: [u, hidden]."""
        media = torch.tensor([self._rules.is_medium(token) for token in heard.user_ids], dtype=torch.bool)
        rows = self._texts(heard.user_ids)
        if bool(media.any()):
            rows[media] = self._talker.hidden_projection(heard.hidden.to(rows))
        return rows

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """The sum of a frame's embeddings and its text row: int [B, q], [B, hidden] -> [B, hidden]."""
        total: torch.Tensor = self.decoder.codec_embedding(codes[:, 0])
        for book, embedding in enumerate(self._predictor.embeddings):
            total = total + embedding(codes[:, book + 1])
        return total if rows is None else total + rows

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, vocab]"""
        scores: torch.Tensor = self._talker.codec_head(last)
        return scores

    def codes(self, last: torch.Tensor, tokens: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[B, hidden], int [B] -> int [B, q]"""
        first = self.decoder.codec_embedding(tokens)
        return torch.cat([tokens[:, None], self._predictor.codes(last, first, draws)], 1)


async def first_of(stream: AsyncIterator[Payload]) -> Heard | None:
    """What the talker's prompt is made of; None for an answer without a word. Raises ItemError."""
    async for payload in stream:
        if "user_ids" not in payload:
            raise ItemError(
                "a talker's first payload must say what users said: is the edge's transfer missing?"
            )
        return Heard(
            torch.as_tensor(payload["user_ids"]).tolist(),
            [
                Span(sound, tuple(grid) if grid else None, seconds, film)
                for sound, grid, seconds, film in payload["spans"]
            ],
            torch.as_tensor(payload["hidden"]),
            payload["opening"],
        )
    return None


class TalkerOutput:
    """A payload for each frame."""

    stopped = False

    def __init__(self, voice: str) -> None:
        self._voice = voice

    def push(self, step: Step) -> Payload | None:
        """One frame, or the end."""
        if step.finish is not None:
            return {"codes": [], "voice": self._voice, "finish_reason": step.finish}
        frame = torch.tensor(step.codes, dtype=torch.int32)[:, None]
        return {"frames": frame, "codes": [step.codes], "voice": self._voice}
