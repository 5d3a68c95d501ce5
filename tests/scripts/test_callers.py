"""The benchmarks' own eyes: a caller that comes back must see what a server repeats, leaves out or loses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from scripts.benchmarks.callers import Answer, Caller, Death, Lost
from scripts.benchmarks.recovery import Outcome, difference

Events = list[tuple[int | str, str]]
BODY = {"model": "echo", "stream": True}


def text(*words: str, first: int = 1) -> Events:
    """Numbered events with a word each."""
    choice = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words]
    return [(number, data) for number, data in enumerate(choice, first)]


@asynccontextmanager
async def serving(*connections: Events) -> AsyncIterator[Callable[[], Caller]]:
    """A server that sends these events over the first, second, ... connection and then breaks it."""
    asked: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        number = len(asked) - 1
        if number:
            sent = connections[number - 1]
            assert request.method == "GET"
            assert request.path == "/v1/requests/abc/stream"
            assert request.headers.get("Last-Event-ID") == str(sent[-1][0])
        response = web.StreamResponse(headers={"x-request-id": "abc" if not number else "other"})
        await response.prepare(request)
        for seq, data in connections[number]:
            await response.write(f"id: {seq}\ndata: {data}\n\n".encode())
        assert request.transport is not None
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    try:
        async with aiohttp.ClientSession() as session:
            yield lambda: Caller(session, f"http://127.0.0.1:{address[1]}", dict(BODY))
    finally:
        await runner.cleanup()


async def test_a_broken_stream_is_continued_after_its_last_event() -> None:
    async with serving(text("a", "b"), [*text("c", first=3), (4, "[DONE]")]) as make:
        caller = make()
        assert await caller.run() == Answer("abc", b"")
        assert (caller.comebacks, caller.duplicated, caller.gaps, caller.posted) == (1, 0, 0, 1)


async def test_what_comes_twice_or_never_is_counted() -> None:
    again = [*text("b", first=2), *text("e", first=5), (6, "[DONE]")]
    async with serving(text("a", "b"), again) as make:
        caller = make()
        assert await caller.run() == Answer("abe", b"")
        assert (caller.duplicated, caller.gaps) == (1, 2)


async def test_each_part_of_an_answer_has_an_order_of_its_own() -> None:
    word, end = text("a")[0][1], "[DONE]"
    for places, counted in {
        ("1.0", "1.1", "2.1"): (0, 0),
        ("1.0", "1.2", "2.2"): (0, 1),
        ("1.0", "1.1", "1.1"): (1, 0),
        ("1.1", "0.2", "1.2"): (1, 1),
    }.items():
        async with serving([*((place, word) for place in places), ("3.9", end)]) as make:
            caller = make()
            await caller.run()
            last_gap = 3 + 9 - sum(map(int, places[-1].split("."))) - 1
            assert (caller.duplicated, caller.gaps - last_gap) == counted, places


async def test_an_error_in_the_stream_is_a_loss() -> None:
    error = (2, json.dumps({"error": {"message": "it died"}}))
    async with serving([*text("a"), error]) as make:
        with pytest.raises(Lost, match="it died"):
            await make().run()


async def test_a_death_is_over_with_the_next_event_of_its_output() -> None:
    async with serving([*text("a", "b"), (3, "[DONE]")]) as make:
        caller = make()
        long_ago = Death("engine killed", 0.0)
        caller.touched(long_ago, "text")
        caller.touched(long_ago, "audio")
        await caller.run()
        assert [(each.pipeline, each.kind) for each in caller.resumed] == [("echo", "engine killed")]


SAMPLES = np.arange(100, dtype=np.int16)


@pytest.mark.parametrize(
    ("pipeline", "answer", "expected"),
    [
        ("echo", Answer("a b c", SAMPLES.tobytes()), ""),
        ("echo", Answer("a b b", SAMPLES.tobytes()), "text from word 2 on: 'b'"),
        ("echo", Answer("a b c", (SAMPLES + 1).tobytes()), "samples differ by up to 1"),
        ("echo", Answer("a b c", SAMPLES[:90].tobytes()), "90 samples for 100"),
        ("voice", Answer("a b c", (SAMPLES + 1).tobytes()), ""),
        ("voice", Answer("a b c", (SAMPLES + 2).tobytes()), "samples differ by up to 2"),
        ("voice", Answer("a b d", SAMPLES[:90].tobytes()), "flip"),
    ],
)
async def test_answers_are_told_apart(pipeline: str, answer: Answer, expected: str) -> None:
    whole = Answer("a b c", SAMPLES.tobytes())
    async with serving() as make:
        assert difference(Outcome(pipeline, 0, answer, "", make()), whole) == expected
