"""The unstreamed answer of a chat: one JSON body."""

from __future__ import annotations

import base64
import time

from aiohttp import web
from msgspec import UNSET

from broker.client import RequestStream
from broker.gateway import completion
from broker.gateway.answer import Answer, count_finished, new_answer, usage_of
from broker.gateway.context import stage_metrics, together
from broker.gateway.metrics import Watch
from broker.gateway.models import IMAGE
from broker.gateway.plan import ChatPlan


async def respond(plan: ChatPlan, streams: list[RequestStream], watch: Watch) -> web.Response:
    """Reads all choices to their end."""
    answers = [new_answer(plan, watch, whole=True) for _ in streams]
    choices: list[completion.Choice] = [None] * len(streams)  # type: ignore[list-item]

    async def collect(index: int) -> None:
        choices[index] = await _collect(plan, index, streams[index], answers[index])

    await together(*(collect(index) for index in range(len(streams))))
    count_finished(watch, answers)
    body = completion.Completion(
        id=plan.chat_id,
        created=plan.created,
        model=plan.model,
        choices=choices,
        usage=usage_of(plan, answers),
        metrics=stage_metrics(streams[0]) if plan.include_metrics else UNSET,
    )
    return web.Response(body=completion.encode(body), content_type="application/json")


async def _collect(plan: ChatPlan, index: int, stream: RequestStream, answer: Answer) -> completion.Choice:
    """Reads one request to its end."""
    text: list[str] = []
    speech: list[bytes] = []
    pictures: list[completion.Part] = []
    async for output, payload in stream:
        if output == IMAGE:
            pictures += await answer.draw(payload)
            continue
        more_text, more_speech = await answer.take(output, payload)
        text.append(more_text)
        speech.append(more_speech)
    speech.append(await answer.finish())
    answer.check(plan)
    words = "".join(text)
    content: str | list[completion.Part] | None = words if plan.writes else None
    if plan.draws:
        content = [*([completion.TextPart(words)] if plan.writes else []), *pictures]
    message = completion.Message(content=content)
    if answer.speech is not None:
        data = base64.b64encode(b"".join(speech)).decode("ascii")
        message.audio = completion.Audio(plan.audio_id(index), data, int(time.time()), words)
    return completion.Choice(index=index, message=message, finish_reason=answer.finish_reason)
