"""What comes with a question besides words, and its places in the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.chunk import Payload
from broker.pixels import Rgb, Video
from pipelines.graph import Pipeline

Clip = npt.NDArray[np.float32]  #: mono, 16 kHz, in [-1, 1]
Messages = list[dict[str, Any]]

_PLURAL = {"audio": "audio", "image": "images", "video": "videos"}


class CannotDo(ValueError):
    """Something is asked of a pipeline that it does not offer, or the question makes no sense."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Clips, pictures and videos.

    In messages, parts like ``{"type": "image", "index": i}`` say where they belong. Those of a kind that no
    part names follow the last user message's text: pictures, then videos, then clips.
    """

    clips: Sequence[Clip] = ()
    images: Sequence[Rgb] = ()
    videos: Sequence[Video] = ()

    def has(self, pipeline: Pipeline) -> list[str]:
        """The modalities of these. Raises CannotDo for one that the pipeline does not take."""
        counts = {"audio": len(self._audio()), "image": len(self.images), "video": len(self.videos)}
        has = [name for name, count in counts.items() if count]
        for name in has:
            if name not in pipeline.takes():
                raise CannotDo(f"{pipeline.name} takes no {_PLURAL[name]}")
        return has

    def fields(self) -> Payload:
        """The request's payload, less its messages. Videos' sounds come after the clips."""
        fields: dict[str, list[Any]] = {
            "audio": self._audio(),
            "images": list(self.images),
            "videos": [video.frames for video in self.videos],
            "video_fps": [video.fps for video in self.videos],
        }
        return {name: values for name, values in fields.items() if values}

    def _audio(self) -> list[Clip]:
        return [*self.clips, *(video.sound for video in self.videos if video.sound is not None)]

    def place(self, prompt: str | Messages) -> Messages:
        """The conversation with a part for each of these.

        Raises CannotDo for one without messages, or without a place for what came along.
        """
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if not messages:
            raise CannotDo("there are no messages")
        named = {part.get("type") for message in messages for part in _parts(message)}
        counts = {"image": len(self.images), "video": len(self.videos), "audio": len(self.clips)}
        loose = [
            {"type": kind, "index": index}
            for kind, count in counts.items()
            if kind not in named
            for index in range(count)
        ]
        if loose:
            last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
            if last < 0:
                what = _PLURAL[str(loose[0]["type"])]
                raise CannotDo(f"there is no user message that the {what} could belong to")
            messages[last] = {**messages[last], "content": [*_as_parts(messages[last]), *loose]}
        return [self._with_sounds(message) for message in messages]

    def _with_sounds(self, message: dict[str, Any]) -> dict[str, Any]:
        """Says in a video's part which of the clips is its own sound."""
        heard = [index for index, video in enumerate(self.videos) if video.sound is not None]
        if not heard or not _parts(message):
            return message
        clip = {index: len(self.clips) + number for number, index in enumerate(heard)}
        content = [
            {**part, "audio": clip[part["index"]]}
            if isinstance(part, dict) and part.get("type") == "video" and part.get("index") in clip
            else part
            for part in message["content"]
        ]
        return {**message, "content": content}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _as_parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])
