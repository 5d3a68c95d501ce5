"""Engines without a broker: jobs made by hand, and what they give."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from adapters.chunk import Payload
from pipelines.graph import Stage
from workers.engine import Engine, Job, Stream

E = TypeVar("E", bound=Engine)


def stage(engine: str, **settings: Any) -> Stage:
    """A stage from what pipeline.yaml would say."""
    return msgspec.convert({"engine": engine, **settings}, Stage)


def stream(payloads: Iterable[Payload]) -> Stream:
    """A finished input."""
    return Stream(list(payloads), closed=True)


def job(*payloads: Payload, seed: int = 1, attempt: int = 1, emitted: int = 0, **params: Any) -> Job:
    """A job with one finished input."""
    return Job("test", {"producer": stream(payloads)}, params, seed, attempt=attempt, emitted=emitted)


async def collect(engine: Engine, work: Job, into: list[Payload] | None = None) -> list[Payload]:
    """All that a job gives; what it gave before an error is in ``into``."""
    given = [] if into is None else into
    async for payload in engine.run(work):
        given.append(payload)
    return given


@asynccontextmanager
async def started(engine: E) -> AsyncIterator[E]:
    """An engine that has loaded, and is stopped in the end."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition. Raises AssertionError when it doesn't come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.001)
