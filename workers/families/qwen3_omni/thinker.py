"""Qwen3-Omni's thinker for the engine ``ar``: a conversation and its encoded media to text.

For a talker the first payload brings what it must know of the prompt, see :meth:`Thinker.begin`. Of the
answer it needs the tokens alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import ItemError, Job
from workers.engines.answers import TextAnswer, TextParams
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Forward, Layout, Model, Prompt, Step, Work
from workers.families.conversation import Conversations, Medium
from workers.families.find import refuse
from workers.families.qwen3_omni.placement import Rules, Span, found, spans_of
from workers.families.sampling import sampling_defaults
from workers.families.weights import Checkpoint
from workers.params import checked

Encoded = Mapping[tuple[str, int], Payload]


class Reading(NamedTuple):
    """A prompt, read."""

    ids: list[int]  #: placeholders one a row
    media: list[Medium]
    spans: list[Span]


class Thinker(Model):
    """The mixture of experts that reads and writes."""

    axes = 3

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        refuse(options, "family_options", "hidden_layers")
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        checkpoint = Checkpoint(str(folder))
        whole = checkpoint.config
        config = whole.thinker_config
        text = config.text_config
        place = {"device": str(device), "dtype": checkpoint.dtype(options.dtype, str(device))}
        self.decoder = use_pages(
            checkpoint.part(
                lambda: modeling.Qwen3OmniMoeThinkerTextModel._from_config(text), "thinker.model.", **place
            )
        )
        self._head = checkpoint.part(
            lambda: torch.nn.Linear(text.hidden_size, text.vocab_size, bias=False),
            "thinker.lm_head.",
            **place,
        )
        self.layout = Layout.of(text, place["dtype"])
        self.max_positions = text.max_position_embeddings
        self._speaks = bool(whole.enable_audio_output)
        self.hidden_layers = [whole.talker_config.accept_hidden_layer] if self._speaks else []
        self._rules = Rules(config, config.vision_config.spatial_merge_size)
        self._conversations = Conversations(checkpoint.folder, options.system_prompt, self._rules.pads)
        tokenizer = self._conversations.tokenizer
        self._film_sound = (
            config.audio_start_token_id,
            tokenizer.convert_tokens_to_ids(tokenizer.audio_eos_token),
        )
        self._roles = Roles(whole.im_start_token_id, whole.user_token_id, whole.assistant_token_id)
        ends = checkpoint.generation.get("eos_token_id", tokenizer.eos_token_id)
        self.stop_ids = [ends] if isinstance(ends, int) else ends
        self.defaults = {"max_tokens": 1024, **sampling_defaults(checkpoint.generation, "thinker")}
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def begin(self, job: Job) -> Work | None:
        """The conversation, with the encoder's rows in it.

        Payloads are those of text. If some stage wants them, the first has beside that: ``user_ids`` int32
        [u], the tokens of all that users said; ``spans``, the media in there, [sound, grid, seconds, in_film]
        each; ``hidden`` float [m, hidden], what the layer that the talker listens to made of their rows; and
        ``assistant_ids``, the last tokens of the prompt, from the answer's start on.
        """
        params = checked(job.params, TextParams)
        request, encoded = await inputs(job)
        loop = asyncio.get_running_loop()
        reading = await loop.run_in_executor(self._tokenizing, self._read, request, encoded)
        answer = TextAnswer(self._conversations.tokenizer.backend_tokenizer, reading.ids, params, job.resumed)
        if answer.ended:
            return None
        prompt = await self.call(self._prompt, reading, encoded)
        speaks = self._speaks and job.consumers and not job.resumed
        first = self._for_talker(reading) if speaks else None
        output = ThinkerOutput(answer, self._rules.counts(reading.ids), self.hidden_layers, first)
        return Work(prompt, output, job.params, [[token] for token in answer.written])

    def _read(self, request: Payload, encoded: Encoded) -> Reading:
        """Expands the template's placeholders, of which there is one for each medium."""
        ids, media = self._conversations.encode(request)
        spans = spans_of(media, encoded)
        expanded: list[int] = []
        left = iter(zip(media, spans, strict=True))
        for token in ids:
            if not self._rules.is_medium(token):
                expanded.append(token)
                continue
            medium, span = next(left)
            rows = self._rules.order(span, medium.kind)
            expanded += [self._film_sound[0], *rows, self._film_sound[1]] if span.in_film else rows
        return Reading(expanded, media, spans)

    def _prompt(self, reading: Reading, encoded: Encoded) -> Prompt:
        """On the engine's thread."""
        ids = torch.tensor(reading.ids, device=self.device)
        embeds = self.decoder.embed_tokens(ids)
        extras: dict[str, torch.Tensor] = {}
        for kind, pad in self._rules.pads.items():
            here = ids == pad
            rows = [found(encoded, *place)["embeds"] for place in _in_order(reading.media, kind)]
            if rows:
                embeds[here] = _joined(rows, 0).to(embeds)
        visual = (ids == self._rules.pads["image"]) | (ids == self._rules.pads["video"])
        if bool(visual.any()):
            places = [(medium.kind, medium.index) for medium in reading.media if medium.kind != "audio"]
            deep = _joined([encoded[place]["deepstack"] for place in places], 1).to(embeds)
            extras["deepstack"] = embeds.new_zeros(len(ids), deep.shape[0], deep.shape[2])
            extras["deepstack"][visual] = deep.transpose(0, 1)
            extras["visual"] = visual
        positions = self._rules.positions(reading.ids, reading.spans)
        return Prompt(
            reading.ids,
            embeds=embeds,
            positions=positions,
            next_position=float(positions.max()) + 1,
            extras=extras,
        )

    def _for_talker(self, reading: Reading) -> First:
        said = self._roles.of_users(reading.ids)
        heard = [said[n] for n, token in enumerate(reading.ids) if self._rules.is_medium(token)]
        spans, at = [], 0
        for span in reading.spans:
            if heard[at]:
                spans.append(list(span))
            at += self._rules.rows(span)
        rows = [n for n, token in enumerate(reading.ids) if said[n] and self._rules.is_medium(token)]
        return First(
            [t for t, s in zip(reading.ids, said, strict=True) if s],
            spans,
            rows,
            self._roles.answer(reading.ids),
        )

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[B, 1] -> [B, hidden]"""
        embedded: torch.Tensor = self.decoder.embed_tokens(codes[:, 0])
        return embedded

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, cache: Any, extras: dict[str, torch.Tensor]
    ) -> Forward:
        """Adds what the vision tower's lower layers saw to the rows of pictures and films."""
        if extras:
            visual = extras["visual"]
            seen = extras["deepstack"][visual].unbind(1)
            extras = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": seen}
        return super().forward(embeds, positions, cache, extras)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, vocab]"""
        scores: torch.Tensor = self._head(last)
        return scores


class Roles(NamedTuple):
    """The tokens by which a prompt's messages are told apart."""

    start: int
    user: int
    assistant: int

    def of_users(self, ids: Sequence[int]) -> list[bool]:
        """For each token, whether it belongs to what a user says, the message's own first tokens included."""
        users, inside = [], False
        for token, following in zip(ids, [*ids[1:], -1], strict=True):
            if token == self.start:
                inside = following == self.user
            users.append(inside)
        return users

    def answer(self, ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, from the start of the answer on. Raises ItemError if there is none."""
        for place in range(len(ids) - 2, -1, -1):
            if ids[place] == self.start and ids[place + 1] == self.assistant:
                return list(ids[place:])
        raise ItemError("the chat template does not begin an answer, so there is none to speak")


class First(NamedTuple):
    """What a talker has to know of a prompt."""

    user_ids: list[int]
    spans: list[list[Any]]
    rows: list[int]  #: of the prompt, those of media that users sent
    assistant_ids: list[int]


class ThinkerOutput:
    """Payloads of text; what a talker needs of the prompt in the first one, what was read in the last."""

    def __init__(
        self, answer: TextAnswer, read: Mapping[str, int], layers: Sequence[int], first: First | None
    ) -> None:
        self._answer = answer
        self._read = read
        self._layers = layers
        self._first = first

    @property
    def stopped(self) -> bool:
        """A stop string was complete."""
        return self._answer.ended

    def push(self, step: Step) -> Payload | None:
        """One token."""
        payload = self._answer.push([step.token], step.finish)
        if self._answer.ended and payload is not None:
            payload["prompt_tokens_details"] = self._read
        if self._first is None:
            return payload
        first, self._first = self._first, None
        return (payload or {"text": "", "token_ids": self._answer.take()}) | {
            "user_ids": torch.tensor(first.user_ids, dtype=torch.int32),
            "spans": first.spans,
            "hidden": step.hidden[self._layers[0]][first.rows],
            "assistant_ids": first.assistant_ids,
        }


async def inputs(job: Job) -> tuple[Payload, dict[tuple[str, int], Payload]]:
    """The request, and what the encoder made of its media by kind and number."""
    request: Payload = {}
    encoded: dict[tuple[str, int], Payload] = {}
    for producer in job.inputs:
        for payload in await job.gather(producer):
            if "embeds" in payload:
                encoded[payload["kind"], payload["index"]] = payload
            else:
                request = payload
    return request, encoded


def _in_order(media: Sequence[Medium], kind: str) -> list[tuple[str, int]]:
    """Which media of a kind a prompt has rows of, films' own sounds among them, in the rows' order."""
    places = []
    for medium in media:
        if medium.kind == kind:
            places.append((kind, medium.index))
        elif kind == "audio" and medium.audio is not None:
            places.append((kind, medium.audio))
    return places


def _joined(tensors: Sequence[Any], axis: int) -> torch.Tensor:
    return torch.cat([torch.as_tensor(tensor) for tensor in tensors], axis)
