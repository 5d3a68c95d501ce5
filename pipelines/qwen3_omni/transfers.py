"""What happens on the edges of the qwen3_omni pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator

from adapters.chunk import Payload

_ROLE = 3  #: tokens that an answer begins with before its first word: start, role, line break


async def spoken(payloads: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
    """From a thinker's payloads to a talker's: what it hears first, then the tokens that it shall say.

    The first payload goes out when the answer's first word is certain: ``user_ids``, ``spans`` and ``hidden``
    as they come, and ``opening``, the answer's first tokens up to this word. Each further one has ``spoken``,
    the next tokens. The last token of an answer is not spoken (it is the one that ends it), and so each token
    waits for the next. An answer without a word gives nothing.
    """
    heard: Payload = {}
    waiting: list[int] = []  # tokens of the answer that are not out, the role's included
    begun = False
    async for payload in payloads:
        if not heard:
            heard = {name: payload[name] for name in ("user_ids", "spans", "hidden")}
            waiting += payload["assistant_ids"]
        waiting += payload["token_ids"]
        if not begun and len(waiting) > _ROLE + 1:
            yield {**heard, "opening": waiting[: _ROLE + 1]}
            begun, waiting = True, waiting[_ROLE + 1 :]
        if begun and len(waiting) > 1:
            yield {"spoken": waiting[:-1]}
            waiting = waiting[-1:]
