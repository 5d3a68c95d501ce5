"""A conversation to a model's tokens, through the chat template that the model brings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adapters.chunk import Payload
from workers.engine import ItemError

Content = str | list[dict[str, Any]]  #: of a message: a text, or parts
#: Stands in a rendered template for text n of the messages. All texts are replaced while it is rendered, so
#: nothing that a user writes can look like it.
_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")


class Prompts:
    """Makes prompts with one tokenizer (transformers'). Not for several threads at once."""

    def __init__(self, tokenizer: Any, system_prompt: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        #: For templates that know texts only: (kind, which one of its kind) -> what stands for a medium there
        self.placeholder: Callable[[str, int], str | None] | None = None
        added = tokenizer.added_tokens_decoder.values()
        control = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._control = re.compile("|".join(map(re.escape, sorted(control))) or "(?!)")

    def encode(self, request: Payload, transcripts: Mapping[int, str]) -> list[int]:
        """Token ids of a request's ``messages``, or without any of its ``prompt`` as it is.

        Message parts {"type": "audio", "index": i} become ``transcripts[i]``.

        Raises :class:`ItemError` (400).
        """
        messages, prompt = request.get("messages"), request.get("prompt")
        if isinstance(prompt, str) and not messages:
            ids: list[int] = self._tokenizer.encode(prompt)
            if not ids:
                raise ItemError("prompt: is empty", status=400, param="prompt")
            return ids
        if not messages:
            raise ItemError("messages: there are none", status=400, param="messages")
        return self.chat(
            [(str(message["role"]), self._text(message["content"], transcripts)) for message in messages]
        )

    def chat(self, messages: Sequence[tuple[str, Content]]) -> list[int]:
        """Token ids of a conversation of (role, content); the system prompt is put before it if it has none.

        A content that is a list is given to the template as it is: {"type": "text", "text"} and whatever
        else the template knows. With ``placeholder`` it becomes one text first, and its other parts have a
        "number", counted within their kind from 1. Raises :class:`ItemError` (400).
        """
        messages = list(messages)
        if self._system_prompt is not None and all(role != "system" for role, _ in messages):
            messages.insert(0, ("system", self._system_prompt))
        texts: list[str] = []

        def marked(text: str) -> str:
            texts.append(text)
            return _MARK.format(len(texts) - 1)

        apart = [(role, _texts(content, marked)) for role, content in messages]
        if not any(self._control.search(text) for text in texts):
            return self._tokens(self._render(messages))
        # Somebody wrote a control token, "<|im_start|>system" say. The template's own control tokens count,
        # those in contents are spelt out as plain text; hence the two are tokenised apart.
        ids: list[int] = []
        for place, piece in enumerate(_MARKS.split(self._render(apart))):
            if place % 2:
                ids += self._tokens(texts[int(piece)], split_special_tokens=True)
            else:
                ids += self._tokens(piece)
        return ids

    def _text(self, content: Any, transcripts: Mapping[int, str]) -> str:
        if isinstance(content, str):
            return content
        return "\n".join(self._part(part, transcripts) for part in content)

    @staticmethod
    def _part(part: Mapping[str, Any], transcripts: Mapping[int, str]) -> str:
        if part["type"] == "text":
            return str(part["text"])
        if part["type"] == "audio" and part["index"] in transcripts:
            return transcripts[part["index"]]
        raise ItemError(
            f"messages: nothing turns {part['type']} into text here", status=400, param="messages"
        )

    def _render(self, messages: Sequence[tuple[str, Content]]) -> str:
        conversation = [{"role": role, "content": self._flat(content)} for role, content in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a template objects to: the order of roles, ...
            raise ItemError(
                f"messages: the chat template says: {error}", status=400, param="messages"
            ) from error
        return str(rendered)

    def _flat(self, content: Content) -> Content:
        if isinstance(content, str) or self.placeholder is None:
            return content
        return "\n".join(
            part["text"] if part["type"] == "text" else self.placeholder(part["type"], part["number"]) or ""
            for part in content
        )

    def _tokens(self, text: str, **how: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **how)["input_ids"])


def _texts(content: Content, change: Callable[[str], str]) -> Content:
    """A content with its texts changed."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]
