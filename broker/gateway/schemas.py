"""Request bodies. Decoding them is the validation of types and ranges; unknown fields are ignored.

Fields of the OpenAI API, and of vLLM's and diffusers', that no pipeline here can honour are listed in
:data:`NEUTRAL` with the values that ask for nothing; any other value is refused, since a parameter that
silently does nothing is worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from broker.gateway.errors import ApiError

Fraction = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Unwanted = Annotated[str, Meta(max_length=32_000)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Timeout = Annotated[float, Meta(gt=0, le=3600)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=16)]
AudioFormat = Literal["wav", "pcm", "pcm16", "flac", "mp3", "opus", "aac"]


class Sampling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How text is generated. Field names are those of the engines' parameters."""

    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    stop: Stops | None = None


# --- chat


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a message's text."""

    text: str


class InputAudio(msgspec.Struct):
    """Base64 (or a data URI) of an audio file, and what kind of file it is."""

    data: str
    format: str


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """A spoken part of a message."""

    input_audio: InputAudio


class Link(msgspec.Struct):
    """A data URI, or a link to a host that the server's operator has allowed."""

    url: str


class ImageLink(Link):
    """A picture, and how much of it should be looked at: "low" shrinks it, the others leave it as it is."""

    detail: Literal["auto", "low", "high", "original"] | None = None


class AudioLinkPart(msgspec.Struct, tag_field="type", tag="audio_url"):
    """A spoken part of a message, as vLLM's callers send it."""

    audio_url: Link


class ImageLinkPart(msgspec.Struct, tag_field="type", tag="image_url"):
    """A picture in a message."""

    image_url: ImageLink


class VideoLinkPart(msgspec.Struct, tag_field="type", tag="video_url"):
    """A video in a message."""

    video_url: Link


Part = TextPart | AudioPart | AudioLinkPart | ImageLinkPart | VideoLinkPart
Parts = Annotated[list[Part], Meta(max_length=64)]


class ChatMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None


class ProcessorOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How media are read, under vLLM's name for it."""

    use_audio_in_video: bool | None = None  #: a video's own sound is heard along with its frames


class AudioOut(msgspec.Struct):
    """How the answer's speech should be."""

    voice: str | dict[str, str] | None = None
    format: AudioFormat | None = None


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(max_length=1024)]
    model: str | None = None
    modalities: list[str] | None = None
    audio: AudioOut | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Seed | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    metrics: bool | None = None
    num_inference_steps: Number | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    size: str | None = None
    negative_prompt: Unwanted | None = None
    priority: Number | None = None
    timeout_s: Timeout | None = None
    store: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    prediction: Any = None
    web_search_options: Any = None
    extra_body: Any = None
    width: Any = None
    height: Any = None
    min_p: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    audio_embeds: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    final_stage_id: Any = None


#: Field -> values that ask for nothing. JSON's null is always one of them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "prediction": (),
    "web_search_options": (),
    "extra_body": ({},),
    "width": (),
    "height": (),
    "min_p": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "audio_embeds": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "final_stage_id": (),
}

#: What to do instead.
CURES = {
    "extra_body": "its fields belong beside it, at the top",
    "width": 'say "size": "WIDTHxHEIGHT"',
    "height": 'say "size": "WIDTHxHEIGHT"',
    "num_images_per_prompt": "say n",
    "final_stage_id": "say which outputs are wanted with modalities",
}


def refuse_unsupported(body: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Raises ApiError for a field that asks for something no pipeline can do."""
    for field, values in neutral.items():
        value = getattr(body, field)
        if value is not None and value not in values:
            cure = f": {CURES[field]}" if field in CURES else ""
            raise ApiError(f"{field} is not supported{cure}", field, code="unsupported_parameter")


# --- speech and transcription


class SpeechRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: str | None = None
    voice: str | dict[str, str] | None = None
    instructions: str | None = None
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    stream_format: Literal["sse", "audio"] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    timeout_s: Timeout | None = None
    store: bool | None = None
    extra_body: Any = None


class TranscriptionForm(msgspec.Struct, kw_only=True):
    """The fields of POST /v1/audio/transcriptions besides ``file``; numbers and booleans come as text."""

    model: str | None = None
    language: Annotated[str, Meta(pattern=r"^[a-z]{2,3}$")] | None = None
    prompt: Annotated[str, Meta(max_length=4096)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Fraction | None = None
    timestamp_granularities: list[Literal["segment"]] | UnsetType = UNSET
    stream: bool = False
    timeout_s: Timeout | None = None
