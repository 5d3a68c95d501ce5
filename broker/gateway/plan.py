"""What one chat request has been worked out to be."""

from __future__ import annotations

import msgspec

from broker.gateway.answer import Answer, Speech
from broker.gateway.context import Call
from broker.gateway.metrics import Watch
from broker.gateway.models import AUDIO
from broker.gateway.usage import Usage, chat_usage


class ChatPlan(msgspec.Struct, kw_only=True):
    """A checked chat request; whatever could be refused has been.

    Attributes:
        modalities: What the caller gets; the call's outputs may hold the text besides, as a transcript.
        heard_tokens: Audio tokens of the prompt.
    """

    call: Call
    id: str
    request_id: str
    created: int
    modalities: list[str]
    audio_format: str
    choices: int
    stream: bool
    include_usage: bool
    include_metrics: bool
    heard_tokens: int
    watch: Watch

    def answer(self, *, whole: bool) -> Answer:
        """A fresh, empty choice; ``whole``: it is sent when it is complete."""
        speech = Speech(self.audio_format, whole=whole) if AUDIO in self.modalities else None
        return Answer(speech, self.watch)

    def audio_id(self, index: int) -> str:
        """The id of a choice's speech. Nothing can be fetched by it: answers are not kept."""
        return f"audio-{self.request_id}-{index}"

    def usage(self, answers: list[Answer]) -> Usage:
        """The sum over all choices; the prompt counts once."""
        return chat_usage(
            max(answer.prompt_tokens for answer in answers),
            self.heard_tokens,
            sum(answer.text_tokens for answer in answers),
            sum(answer.audio_tokens for answer in answers),
        )

    def finished(self, answers: list[Answer]) -> None:
        """Counts a complete answer."""
        self.watch.done(sum(answer.speech.seconds for answer in answers if answer.speech))
