"""What a call has been worked out to be, as far as its answer's form goes.

A plan is kept at the broker with the call's requests, so that any gateway can make the answer's bytes again,
from the beginning, for a caller that comes back. What was asked is not in it: the broker has that.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from broker.gateway.models import AUDIO, IMAGE, TEXT


class Plan(msgspec.Struct, kw_only=True, tag_field="kind"):
    """A checked call; whatever could be refused has been.

    Attributes:
        id: The call's, 24 hex digits. Its requests at the broker are named "<id>-0", "<id>-1", ...
        tenant: Whose it is.
        stored: It goes on without its caller, and can be fetched later.
        choices: How many requests it makes.
        stream: Its caller wants pieces as they come.
    """

    id: str
    model: str
    created: int
    tenant: str = ""
    stored: bool = False
    choices: int = 1
    stream: bool = False

    def names(self) -> list[str]:
        """Its requests' names at the broker."""
        return [request_name(self.id, number) for number in range(self.choices)]

    @property
    def lanes(self) -> int:
        """How many counts a place in its stream has (see :mod:`broker.gateway.places`)."""
        return 1


class ChatPlan(Plan, tag="chat", kw_only=True):
    """A chat.

    Attributes:
        modalities: What the caller gets.
        outputs: What is asked of the broker: these may hold the text besides, as a transcript.
        heard_tokens: Audio tokens of the prompt.
    """

    modalities: list[str]
    outputs: list[str]
    audio_format: str
    include_usage: bool
    include_metrics: bool
    heard_tokens: int

    @property
    def lanes(self) -> int:
        """See :class:`Plan`: one for each output of each choice."""
        return self.choices * len(self.outputs)

    def lanes_of(self, choice: int) -> range:
        """The lanes of one choice."""
        return range(choice * len(self.outputs), (choice + 1) * len(self.outputs))

    def lane(self, choice: int, output: str) -> int:
        """The lane of one output of a choice."""
        return choice * len(self.outputs) + self.outputs.index(output)

    @property
    def chat_id(self) -> str:
        """The answer's id."""
        return f"chatcmpl-{self.id}"

    def audio_id(self, choice: int) -> str:
        """The id of a choice's speech. Later messages can't refer to it."""
        return f"audio-{self.id}-{choice}"

    @property
    def speaks(self) -> bool:
        """Whether audio is wanted."""
        return AUDIO in self.modalities

    @property
    def writes(self) -> bool:
        """Whether text is wanted."""
        return TEXT in self.modalities

    @property
    def draws(self) -> bool:
        """Whether a picture is wanted."""
        return IMAGE in self.modalities


class SpeechPlan(Plan, tag="speech", kw_only=True):
    """Text to be spoken. ``stream`` means bytes or events as they are made.

    Attributes:
        characters: Length of the text.
        events: The stream is one of events.
    """

    format: str
    characters: int
    events: bool


class TranscriptPlan(Plan, tag="transcription", kw_only=True):
    """A recording to be written down.

    Attributes:
        seconds: The recording's length.
        language: As the caller said.
        segments: Whether verbose JSON lists them.
    """

    seconds: float
    language: str | None
    format: str
    segments: bool


class ImagesPlan(Plan, tag="images", kw_only=True):
    """Pictures, one for each choice.

    Attributes:
        events: What the events of its stream are called: "image_generation" or "image_edit".
        quality: Of JPEG and WebP, 0 to 100.
        seed: Of the first picture; each further one has the next.
        text_tokens: What was asked, in characters.
        image_tokens: What pictures came along.
    """

    events: str
    format: Literal["png", "jpeg", "webp"]
    quality: int
    seed: int
    text_tokens: int
    image_tokens: int

    @property
    def lanes(self) -> int:
        """See :class:`Plan`: one for each picture."""
        return self.choices


class VideoPlan(Plan, tag="video", kw_only=True):
    """A film: a job that its caller looks at later. Always stored.

    Attributes:
        size: As it was asked for, "auto" for the model's own.
        seconds: Likewise.
        keep_s: For how long it is kept after its end.
    """

    prompt: str
    size: str
    seconds: str
    seed: int
    keep_s: float


AnyPlan = ChatPlan | SpeechPlan | TranscriptPlan | ImagesPlan | VideoPlan

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyPlan).decode


def request_name(call: str, number: int) -> str:
    """The name at the broker of a call's ``number``-th request."""
    return f"{call}-{number}"
