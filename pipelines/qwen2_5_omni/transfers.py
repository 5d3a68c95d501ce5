"""What happens on the edges of the qwen2_5_omni pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator

from adapters.chunk import Payload


async def replies(payloads: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
    """From a thinker's rows to a talker's.

    The first payload that comes has the prompt's rows, each later one those of some tokens of the answer. The
    talker begins when it has the prompt and the first token:

        {"prompt": [n, hidden], "positions": int [3, n], "next_position", "first": [1, hidden]}

    and then gets {"rows": [k, hidden]}. An answer that ends before gives nothing.
    """
    prompt: Payload | None = None
    begun = False
    async for payload in payloads:
        rows = payload["rows"]
        if prompt is None:
            prompt = payload
        elif not begun:
            begun = True
            begin = {name: prompt[name] for name in ("positions", "next_position")}
            yield {**begin, "prompt": prompt["rows"], "first": rows[:1]}
            if len(rows) > 1:
                yield {"rows": rows[1:]}
        else:
            yield {"rows": rows}
