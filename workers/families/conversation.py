"""A conversation with pictures, films and sounds in it, to tokens: one placeholder for each medium.

How many placeholders a medium takes, and in which order those of a film and its sound stand, is the family's
affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.engines.prompt import Content, Prompts
from workers.families.weights import read_json


@dataclass(frozen=True)
class Medium:
    """A picture, film or sound of a request, where a message has it."""

    kind: str  #: "audio", "image" or "video"
    index: int  #: which one of its kind
    audio: int | None = None  #: of a video: the clip that is its own sound


class Conversations:
    """Makes prompts for one checkpoint. Not for several threads at once.

    Args:
        folder: The checkpoint, with tokenizer and chat template.
        system_prompt: Put before conversations that bring none of their own.
        pads: Kind -> the token that the chat template writes for a medium of that kind.
    """

    def __init__(self, folder: Path, system_prompt: str | None, pads: Mapping[str, int]) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.is_fast:
            raise ValueError(f"{folder}: its tokenizer has no fast (Rust) version, which is needed here")
        if self.tokenizer.chat_template is None:  # some keep it with the processor
            self.tokenizer.chat_template = read_json(folder / "chat_template.json").get("chat_template")
        self._prompts = Prompts(self.tokenizer, system_prompt)
        self._kinds = {token: kind for kind, token in pads.items()}

    def encode(self, request: Payload) -> tuple[list[int], list[Medium]]:
        """Token ids of a request's ``messages``, and the media in the order of their placeholders.

        Raises :class:`ItemError` (400).
        """
        messages = request.get("messages")
        if not messages:
            raise ItemError("messages: there are none", status=400, param="messages")
        media: list[Medium] = []
        ids = self._prompts.chat(
            [(str(message["role"]), _content(message["content"], media)) for message in messages]
        )
        if [self._kinds[token] for token in ids if token in self._kinds] != [medium.kind for medium in media]:
            raise ItemError(
                "messages: the chat template has no place for one of these parts",
                status=400,
                param="messages",
            )
        return ids, media


def _content(content: str | list[dict[str, Any]], media: list[Medium]) -> Content:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": part["text"]})
        else:
            media.append(Medium(part["type"], part["index"], part.get("audio")))
            parts.append({"type": part["type"]})
    return parts
