"""What happens on the edges of the voice pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator

from adapters.chunk import Payload
from pipelines.voice.sentences import Splitter
from pipelines.voice.speakable import CodeFilter, speakable


async def sentences(payloads: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
    """From a thinker's text, piece by piece, to ``{"text": sentence}`` for a talker, as early as possible.

    Text that can't be said (code, emoji, a lone full stop) gives nothing.
    """
    prose, splitter = CodeFilter(), Splitter()
    async for payload in payloads:
        for piece in splitter.feed(prose.feed(payload.get("text") or "")):
            if sentence := speakable(piece):
                yield {"text": sentence}
    for piece in splitter.flush():
        if sentence := speakable(piece):
            yield {"text": sentence}
