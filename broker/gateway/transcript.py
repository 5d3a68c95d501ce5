"""A transcript while it grows, and the forms in which callers want it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from adapters.chunk import Payload
from broker.client import RequestStream
from broker.gateway.metrics import Watch
from broker.gateway.plan import TranscriptPlan
from broker.gateway.sse import Events, Reader
from broker.gateway.usage import heard_tokens


class Segment(msgspec.Struct, kw_only=True):
    """A stretch of speech, in the shape of OpenAI's verbose JSON; times in seconds."""

    id: int
    seek: int = 0
    start: float
    end: float
    text: str
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


_encode = msgspec.json.Encoder().encode

#: What an engine may say of a segment besides its text and times.
_EXTRA = ("seek", "tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")


class Transcript:
    """Collects a clip's segments.

    Args:
        seconds: Length of the clip.
        language: As the caller said; else the engine's finding is taken.
    """

    def __init__(self, seconds: float, language: str | None) -> None:
        self.seconds = seconds
        self.language = language or ""
        self.segments: list[Segment] = []
        self._tokens = 0

    @property
    def text(self) -> str:
        """All of it."""
        return " ".join(segment.text for segment in self.segments)

    def add(self, payload: Payload) -> str:
        """Takes ``{"text", "start", "end", "language", ...}`` and returns the text that this adds."""
        self.language = self.language or payload.get("language") or ""
        text = payload.get("text", "").strip()
        if not text:
            return ""
        extra = {name: payload[name] for name in _EXTRA if name in payload}
        start, end = float(payload.get("start", 0.0)), float(payload.get("end", self.seconds))
        self.segments.append(Segment(id=len(self.segments), start=start, end=end, text=text, **extra))
        self._tokens += len(extra.get("tokens") or text.split())
        return text if len(self.segments) == 1 else f" {text}"

    def duration(self) -> dict[str, Any]:
        """Usage of an unstreamed transcript."""
        return {"type": "duration", "seconds": round(self.seconds, 3)}

    def tokens(self) -> dict[str, Any]:
        """Usage of a streamed one: audio by the 100 ms, text by the engine's tokens or else by words."""
        heard = heard_tokens(self.seconds)
        return {
            "type": "tokens",
            "input_tokens": heard,
            "input_token_details": {"audio_tokens": heard, "text_tokens": 0},
            "output_tokens": self._tokens,
            "total_tokens": heard + self._tokens,
        }

    def verbose(self, *, segments: bool) -> dict[str, Any]:
        """The body of ``verbose_json``."""
        body = {
            "task": "transcribe",
            "language": self.language,
            "duration": round(self.seconds, 3),
            "text": self.text,
            "usage": self.duration(),
        }
        return body | {"segments": self.segments} if segments else body

    def srt(self) -> str:
        """SubRip subtitles."""
        return "".join(
            f"{s.id + 1}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text}\n\n"
            for s in self.segments
        )

    def vtt(self) -> str:
        """WebVTT subtitles (https://www.w3.org/TR/webvtt1/)."""
        cues = (f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{_cue(s.text)}\n\n" for s in self.segments)
        return "WEBVTT\n\n" + "".join(cues)


async def respond(
    reader: Reader, plan: TranscriptPlan, stream: RequestStream, watch: Watch
) -> web.StreamResponse:
    """Sends the text as events, a segment each."""
    transcript = Transcript(plan.seconds, plan.language)
    events = Events(reader)
    async with events.whole(plan.id):
        async for _, payload in stream:
            delta = transcript.add(payload)
            if delta:
                await events.send(_encode({"type": "transcript.text.delta", "delta": delta}))
        done = {"type": "transcript.text.done", "text": transcript.text, "usage": transcript.tokens()}
        watch.done()
        await events.send(_encode(done))
    return events.response


async def whole(plan: TranscriptPlan, stream: RequestStream, watch: Watch) -> web.Response:
    """The transcript in the form that the caller wanted."""
    transcript = Transcript(plan.seconds, plan.language)
    async for _, payload in stream:
        transcript.add(payload)
    watch.done()
    match plan.format:
        case "json":
            return _json({"text": transcript.text, "usage": transcript.duration()})
        case "verbose_json":
            return _json(transcript.verbose(segments=plan.segments))
        case "srt":
            return _text(transcript.srt(), "application/x-subrip")
        case "vtt":
            return _text(transcript.vtt(), "text/vtt")
        case _:
            return _text(transcript.text + "\n", "text/plain")


def _json(body: object) -> web.Response:
    return web.Response(body=_encode(body), content_type="application/json")


def _text(body: str, content_type: str) -> web.Response:
    return web.Response(text=body, content_type=content_type, charset="utf-8")


def _cue(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, point: str) -> str:
    millis = round(seconds * 1000)
    minutes, millis = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{millis // 1000:02}{point}{millis % 1000:03}"
