"""The streamed answer of a chat: one event per piece of text or speech, choices side by side.

A choice's last chunk alone carries its ``finish_reason``. The end of everything is ``[DONE]``; after an
error object nothing follows, not even that, so a cut answer can't be taken for a whole one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET

from broker.client import RequestStream
from broker.gateway.answer import Answer, Base64Pieces, count_finished, new_answer, usage_of
from broker.gateway.completion import AudioDelta, Chunk, ChunkChoice, Delta, ImagePart, encode
from broker.gateway.context import stage_metrics, together
from broker.gateway.metrics import Watch
from broker.gateway.models import AUDIO, IMAGE, TEXT
from broker.gateway.plan import ChatPlan
from broker.gateway.sse import DONE, Events, Reader


async def respond(
    reader: Reader, plan: ChatPlan, streams: list[RequestStream], watch: Watch
) -> web.StreamResponse:
    """Sends the stream. An error before the first event is raised, a later one is sent."""
    events = Events(reader)
    if plan.stored:
        await events.begin()  # the headers tell the id, by which the answer can be fetched from now on
    answers = [new_answer(plan, watch, whole=False) for _ in streams]
    writers = [_ChoiceWriter(events, reader, plan, i, answer) for i, answer in enumerate(answers)]
    async with events.whole(plan.id):
        await together(*(w.run(stream) for w, stream in zip(writers, streams, strict=True)))
        count_finished(watch, answers)
        if plan.include_usage or plan.include_metrics:
            await events.send(encode(_closing_chunk(plan, answers, streams[0])))
        await events.send(DONE)
    return events.response


def _closing_chunk(plan: ChatPlan, answers: list[Answer], stream: RequestStream) -> Chunk:
    return Chunk(
        id=plan.chat_id,
        created=plan.created,
        model=plan.model,
        modality=plan.modalities[0],
        choices=[],
        usage=usage_of(plan, answers) if plan.include_usage else UNSET,
        metrics=stage_metrics(stream) if plan.include_metrics else UNSET,
    )


class _ChoiceWriter:
    """Turns one request's outputs into one choice's chunks."""

    def __init__(self, events: Events, reader: Reader, plan: ChatPlan, index: int, answer: Answer) -> None:
        self._events = events
        self._plan = plan
        self._index = index
        self._answer = answer
        self._pieces = Base64Pieces()
        # A reader that comes back with some event has the choice's very first one: that had the role, and
        # the speech's id too if there is speech, in whichever lane it was.
        known = reader.place.has_some(plan.lanes_of(index))
        self._begun = known
        self._spoken = known  # whether a delta with the speech's id is out

    async def run(self, stream: RequestStream) -> None:
        """Sends the choice's chunks, from its role to its finish_reason."""
        async for output, payload in stream:
            if output == IMAGE:
                picture = await self._answer.draw(payload)
                del payload  # its memory goes back before we wait for the client
                await self._send_picture(picture)
                continue
            text, speech = await self._answer.take(output, payload)
            del payload  # its memory goes back before we wait for the client
            if text:
                await self._send_text(text)
            for piece in self._pieces.feed(speech):
                await self._send(AUDIO, AUDIO, Delta(audio=self._audio(AudioDelta(data=piece))))
        if self._answer.speech is not None:
            await self._end_speech()
        self._answer.check(self._plan)
        await self._send(
            self._plan.outputs[0],
            TEXT if self._plan.writes else self._plan.modalities[0],
            Delta(),
            self._answer.finish_reason,
        )

    async def _send_text(self, text: str) -> None:
        delta = Delta(content=text) if self._plan.writes else Delta()
        if self._answer.speech is not None:
            delta.audio = self._audio(AudioDelta(transcript=text))
        await self._send(TEXT, TEXT if self._plan.writes else self._plan.modalities[0], delta)

    async def _send_picture(self, picture: Sequence[ImagePart]) -> None:
        if picture:
            await self._send(IMAGE, IMAGE, Delta(content=[*picture]))

    async def _end_speech(self) -> None:
        for piece in self._pieces.feed(await self._answer.finish()) + self._pieces.finish():
            await self._send(AUDIO, AUDIO, Delta(audio=self._audio(AudioDelta(data=piece))))
        await self._send(AUDIO, AUDIO, Delta(audio=AudioDelta(expires_at=int(time.time()))))

    def _audio(self, delta: AudioDelta) -> AudioDelta:
        if not self._spoken:
            self._spoken = True
            delta.id = self._plan.audio_id(self._index)
        return delta

    async def _send(self, output: str, modality: str, delta: Delta, finish_reason: str | None = None) -> None:
        if not self._begun:
            self._begun = True
            delta.role = "assistant"
        plan = self._plan
        chunk = Chunk(
            id=plan.chat_id,
            created=plan.created,
            model=plan.model,
            modality=modality,
            choices=[ChunkChoice(self._index, delta, finish_reason)],
            usage=None if plan.include_usage else UNSET,
        )
        await self._events.send(encode(chunk), plan.lane(self._index, output))
