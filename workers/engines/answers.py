"""What engines that write text have in common: a request's wishes, its conversation, its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from adapters.chunk import Payload
from workers.engine import Job
from workers.engines.detokenize import TextStream


class SamplingParams(msgspec.Struct, frozen=True):
    """A request's wishes. None: the model's own default (its generation config), else the engine's."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False  #: tokens that end an answer are tokens like others


class TextParams(SamplingParams, frozen=True):
    """What only text can have."""

    stop: list[Annotated[str, Meta(min_length=1)]] = []


async def conversation(job: Job) -> tuple[Payload, dict[int, str]]:
    """The request, and what was said in its clips: the clip's number -> its words."""
    request: Payload = {}
    transcripts: dict[int, str] = {}
    for producer in job.inputs:
        for payload in await job.gather(producer):
            if "index" in payload:
                index = payload["index"]
                transcripts[index] = transcripts.get(index, "") + payload["text"]
            else:
                request = payload
    return request, {index: text.strip() for index, text in transcripts.items()}


def written_tokens(resumed: Sequence[Payload]) -> list[int]:
    """The tokens in payloads that earlier attempts got out."""
    return [token for payload in resumed for token in payload["token_ids"]]


class TextAnswer:
    """One answer as payloads: {"text", "token_ids"}, and the last one's "finish_reason" and counts.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
        prompt: The tokens before the answer.
        params: Stop strings, and how many tokens come before any of them counts.
        resumed: What earlier attempts got out.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], params: TextParams, resumed: Sequence[Payload]
    ) -> None:
        self.written = written_tokens(resumed)
        self.count = len(self.written)  #: tokens so far
        self.ended = bool(resumed and resumed[-1].get("finish_reason"))  #: the last payload is out
        self._prompt_tokens = len(prompt)
        self._text = TextStream(tokenizer, prompt, params.stop, params.min_tokens)
        self._text.push(self.written)  # is out already
        self._tokens: list[int] = []  # not out yet

    def push(self, ids: Sequence[int], finish: str | None) -> Payload | None:
        """Takes tokens; returns what goes out now. ``finish`` "stop": the last token is no text."""
        before = self._text.tokens
        piece = self._text.push(ids[:-1] if finish == "stop" else ids)
        stopped = self._text.stopped
        new = ids[: self._text.tokens - before] if stopped else ids
        self._tokens += new
        self.count += len(new)
        if reason := "stop" if stopped else finish:
            return self.end(reason, piece)
        if not piece:
            return None
        return {"text": piece, "token_ids": self.take()}

    def end(self, reason: str, piece: str = "") -> Payload:
        """The last payload."""
        self.ended = True
        return {
            "text": piece + self._text.finish(),
            "token_ids": self.take(),
            "finish_reason": reason,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.count,
        }

    def take(self) -> list[int]:
        """Tokens that no payload has brought yet; whoever takes them brings them."""
        tokens, self._tokens = self._tokens, []
        return tokens
