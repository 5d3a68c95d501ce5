"""What is large in sum goes in parts: a frame that the broker does not take would end the connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adapters.handle import BadPayload
from broker.client import BrokerError
from broker.wire import MAX_FRAME
from tests.core.driver import line
from tests.wire.rig import Counter, payload, rig
from tests.wire.test_flow_control import numbers

MOST = MAX_FRAME * 5 // 8  #: two are more than a frame may have


class Large(Counter):
    """Yields text that no message can carry."""

    async def run(self, job):  # type: ignore[no-untyped-def]
        """One payload."""
        yield {**payload(0, 10_000), "text": "x" * MAX_FRAME}


async def test_requests_of_one_moment_may_be_larger_than_a_frame(tmp_path: Path) -> None:
    async with rig(tmp_path, line("a"), {"a": Counter(1)}) as made:
        given = {"request": [{"text": "x" * MOST}]}
        submits = (made.client.submit("line", outputs=["out"], given=given) for _ in range(2))
        async with asyncio.timeout(60):
            for stream in await asyncio.gather(*submits):
                assert await numbers(stream) == [0]
                stream.done()


async def test_a_request_that_no_frame_can_carry_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, line("a"), {"a": Counter(1)}) as made:
        with pytest.raises(BadPayload, match="64 MiB"):
            await made.client.submit("line", outputs=["out"], given={"request": [{"text": "x" * MAX_FRAME}]})


async def test_a_payload_that_no_frame_can_carry_fails_its_request_alone(tmp_path: Path) -> None:
    async with rig(tmp_path, line("a", retry={"attempts": 1}), {"a": Large(1)}) as made:
        stream = await made.submit()
        async with asyncio.timeout(60):
            with pytest.raises(BrokerError, match="64 MiB"):
                await numbers(stream)
        stream.done()
        await made.client.letters("drop", "all")
