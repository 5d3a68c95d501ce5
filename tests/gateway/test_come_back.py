"""A caller that comes back gets the rest of its answer, from any gateway: no gap, no repeat."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.gateway.stack import Stack, empty, standing_still
from tests.gateway.test_bad_requests import CHAT, SPEECH
from tests.gateway.test_disconnects import HANG

SAID = "one two three four five six"
ASK: Any = [{"role": "user", "content": SAID}]
BOTH = ["text", "audio"]
SOUND = {"voice": "alloy", "format": "pcm16"}
WANTS_IDS = {"Accept": "text/event-stream"}


class Event(NamedTuple):
    """An event as it came: its place, and its data."""

    id: str | None
    data: str


def parse(block: str) -> Event:
    """One event, of at most an `id` and a `data` line."""
    *head, data = block.split("\n")
    assert data.startswith("data: ")
    assert all(line.startswith("id: ") for line in head)
    assert len(head) <= 1
    return Event(head[0][4:] if head else None, data[6:])


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The events of a response as they come."""
    rest = ""
    async for piece in response.content.iter_any():
        *blocks, rest = (rest + piece.decode()).split("\n\n")
        for block in blocks:
            yield parse(block)
    assert rest == ""


async def read(response: aiohttp.ClientResponse) -> list[Event]:
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    return [event async for event in events(response)]


async def ask(http: aiohttp.ClientSession, **fields: Any) -> tuple[str, list[Event]]:
    """A stored, streamed chat: its id and its events."""
    body = {**CHAT, "messages": ASK, "stream": True, "store": True, "seed": 3, **fields}
    async with http.post("/v1/chat/completions", json=body) as response:
        return response.headers["x-request-id"], await read(response)


async def rest(http: aiohttp.ClientSession, call: str, after: str | None) -> list[Event]:
    params = {} if after is None else {"after": after}
    async with http.get(f"/v1/requests/{call}/stream", params=params) as response:
        assert response.headers["x-request-id"] == call
        return await read(response)


async def drop(http: aiohttp.ClientSession, call: str) -> None:
    """Nothing of a stored call is to stay in the broker."""
    async with http.delete(f"/v1/requests/{call}") as response:
        assert response.status == 200, await response.text()


class Joined:
    """What a client makes of a chat's events: every choice's text, speech and marks, and what ends it all."""

    def __init__(self, parts: list[Event]) -> None:
        self.text: dict[int, str] = {}
        self.speech: dict[int, str] = {}
        self.transcript: dict[int, str] = {}
        self.marks: list[tuple[int, str]] = []
        self.usage: Any = None
        self.done = 0
        for event in parts:
            if event.data == "[DONE]":
                self.done += 1
            else:
                self._take(json.loads(event.data))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            audio = delta.get("audio", {})
            self._add(self.text, index, delta.get("content"))
            self._add(self.speech, index, audio.get("data"))
            self._add(self.transcript, index, audio.get("transcript"))
            self.marks += [(index, name) for name in ("role",) if name in delta]
            self.marks += [(index, name) for name in ("id", "expires_at") if name in audio]
            self.marks += [(index, choice["finish_reason"])] if choice["finish_reason"] else []

    @staticmethod
    def _add(texts: dict[int, str], index: int, more: str | None) -> None:
        if more:
            texts[index] = texts.get(index, "") + more

    @property
    def all(self) -> dict[str, Any]:
        """All of it, to be compared: how the outputs interleaved is chance."""
        return {**vars(self), "marks": sorted(self.marks)}


# --- ids


@pytest.mark.parametrize("fields", [{}, {"modalities": BOTH, "n": 2}])
async def test_events_have_one_line_unless_ids_are_asked_for(
    http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    """Load generators take each event for one line, so ids come to those that say they read events."""
    body = {**CHAT, "messages": ASK, "stream": True, **fields}
    async with http.post("/v1/chat/completions", json=body) as response:
        plain = await read(response)
    assert {event.id for event in plain} == {None}
    async with http.post("/v1/chat/completions", json=body, headers=WANTS_IDS) as response:
        counted = await read(response)
    assert len({event.id for event in counted}) == len(counted)
    assert all(event.id for event in counted)


async def test_a_place_counts_the_events_of_one_text(http: aiohttp.ClientSession) -> None:
    body = {**CHAT, "messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body, headers=WANTS_IDS) as response:
        got = await read(response)
    assert [event.id for event in got] == [str(number) for number in range(1, len(got) + 1)]
    assert got[-1].data == "[DONE]"


async def test_the_official_client_reads_events_with_ids(
    openai: AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    chunks = await openai.chat.completions.create(model="echo", messages=ASK, stream=True, store=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    assert text == SAID
    await drop(http, chunks.response.headers["x-request-id"])


# --- the rest of a stream


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modalities": BOTH, "audio": SOUND},
        {"modalities": ["audio"], "audio": {"voice": "alloy", "format": "mp3"}},
        {"modalities": BOTH, "audio": SOUND, "n": 3, "stream_options": {"include_usage": True}},
    ],
    ids=["text", "both", "audio", "three choices"],
)
async def test_beginning_and_rest_are_the_whole_wherever_it_broke(
    http: aiohttp.ClientSession, broker: Client, fields: dict[str, Any]
) -> None:
    call, got = await ask(http, **fields)
    complete = Joined(got).all
    assert complete["done"] == 1
    for cut in range(len(got) + 1):
        after = got[cut - 1].id if cut else None
        more = await rest(http, call, after)
        assert len(more) == len(got) - cut
        assert Joined(got[:cut] + more).all == complete
        assert [event.id for event in more][-1:] == [event.id for event in got[cut:]][-1:]
    await drop(http, call)


async def test_the_browsers_header_names_the_place_too(http: aiohttp.ClientSession) -> None:
    call, got = await ask(http)
    async with http.get(f"/v1/requests/{call}/stream", headers={"Last-Event-ID": "3"}) as response:
        assert await read(response) == got[3:]
    headers = {"Last-Event-ID": "3"}
    async with http.get(f"/v1/requests/{call}/stream?after=5", headers=headers) as response:
        assert await read(response) == got[5:]
    async with http.get(f"/v1/requests/{call}/stream?after=2", headers=headers) as response:
        assert await read(response) == got[3:], "an EventSource asks for the same address when it comes back"
    await drop(http, call)


async def test_a_look_at_the_head_takes_nothing_from_the_reader(http: aiohttp.ClientSession) -> None:
    call, got = await ask(http)
    for place in ("stream", "result"):
        async with http.head(f"/v1/requests/{call}/{place}") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET"
    assert await rest(http, call, None) == got
    await drop(http, call)


@pytest.mark.parametrize("format_", ["pcm", "wav", "mp3", "opus", "flac", "aac"])
@pytest.mark.parametrize("stream", [True, False])
async def test_raw_speech_goes_on_after_any_byte(
    http: aiohttp.ClientSession, format_: str, stream: bool
) -> None:
    body = {**SPEECH, "input": SAID, "response_format": format_, "store": True, "stream": stream}
    async with http.post("/v1/audio/speech", json=body) as response:
        call, data = response.headers["x-request-id"], await response.read()
    for after in (0, 1, 45, 9601, len(data) - 1, len(data)):
        async with http.get(f"/v1/requests/{call}/stream", params={"after": after}) as response:
            assert response.headers["Content-Type"]
            assert await response.read() == data[after:]
    async with http.get(f"/v1/requests/{call}/result") as response:
        file = await response.read()
    assert len(file) == int(response.headers["Content-Length"]) == len(data)
    await drop(http, call)


async def test_speech_events_go_on(http: aiohttp.ClientSession) -> None:
    body = {**SPEECH, "input": SAID, "response_format": "pcm", "stream_format": "sse", "store": True}
    async with http.post("/v1/audio/speech", json=body) as response:
        call, got = response.headers["x-request-id"], await read(response)
    assert [event.id for event in got] == [str(number) for number in range(1, len(got) + 1)]
    for cut in range(len(got) + 1):
        assert await rest(http, call, str(cut)) == got[cut:]
    await drop(http, call)


async def test_the_result_is_the_body_of_an_unstreamed_call(http: aiohttp.ClientSession) -> None:
    body = {**CHAT, "messages": ASK, "modalities": BOTH, "n": 2, "store": True, "metrics": True}
    async with http.post("/v1/chat/completions", json=body) as response:
        call, first = response.headers["x-request-id"], await response.json()
    async with http.get(f"/v1/requests/{call}/result") as response:
        again = await response.json()
    for answer in (first, again):
        for choice in answer["choices"]:
            del choice["message"]["audio"]["expires_at"]
    assert again == first
    joined = Joined(await rest(http, call, None))
    assert joined.text == {choice["index"]: choice["message"]["content"] for choice in first["choices"]}
    await drop(http, call)


# --- leaving


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def status(http: aiohttp.ClientSession, call: str) -> dict[str, Any]:
    async with http.get(f"/v1/requests/{call}") as response:
        body: dict[str, Any] = await response.json()
        return {**body, "http": response.status}


async def until_unknown(http: aiohttp.ClientSession, call: str) -> None:
    """What has ended is kept until its gateway says that it was delivered, or that nobody wants it."""

    async def is_unknown() -> bool:
        return bool((await status(http, call))["http"] == 404)

    await until(is_unknown)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stored_call_goes_on_without_its_caller(
    http: aiohttp.ClientSession, broker: Client, stream: bool
) -> None:
    body = {**CHAT, "messages": ASK, "modalities": BOTH, "audio": SOUND, "stream": True, "store": True}
    async with standing_still(broker, "echo", "tone"):
        async with http.post("/v1/chat/completions", json=body) as response:
            call = response.headers["x-request-id"]
            first = await anext(events(response))
            response.close()
        running = await status(http, call)
    assert running["status"] == "running"
    assert running["stored"] is True

    async def is_done() -> bool:
        return bool((await status(http, call))["status"] == "done")

    await until(is_done)
    if stream:
        whole = Joined([first, *await rest(http, call, first.id)])
        assert whole.text[0] == whole.transcript[0] == SAID
        assert whole.speech[0]
    else:
        async with http.get(f"/v1/requests/{call}/result") as response:
            message = (await response.json())["choices"][0]["message"]
        assert message["content"] == message["audio"]["transcript"] == SAID
    await drop(http, call)


async def test_the_id_of_a_stored_stream_is_known_before_its_first_event(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    hang = [HANG, None, None]
    body = {**CHAT, "stream": True, "store": True, "sampling_params_list": hang}
    async with http.post("/v1/chat/completions", json=body) as response:
        call = response.headers["x-request-id"]
        await drop(http, call)
        (event,) = await read(response)
    assert json.loads(event.data)["error"]["code"] == "taken_over"
    await empty(broker)


async def test_a_call_that_is_not_stored_ends_with_its_caller(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    slow = [{"chunk_sleep_s": 0.05}, None, None]
    body = {**CHAT, "messages": ASK, "stream": True, "sampling_params_list": slow}
    async with http.post("/v1/chat/completions", json=body) as response:
        call = response.headers["x-request-id"]
        await anext(events(response))
        response.close()
    await empty(broker)
    await until_unknown(http, call)


async def test_what_was_delivered_is_forgotten(http: aiohttp.ClientSession, broker: Client) -> None:
    async with http.post("/v1/chat/completions", json={**CHAT, "n": 2}) as response:
        call = response.headers["x-request-id"]
    await empty(broker)
    await until_unknown(http, call)


async def test_who_comes_back_takes_the_call_from_who_had_it(
    http: aiohttp.ClientSession, broker: Client
) -> None:
    """A client may notice a broken connection before its gateway does."""
    body = {**CHAT, "messages": ASK, "modalities": BOTH, "audio": SOUND, "stream": True}
    async with (
        standing_still(broker, "echo", "tone"),
        http.post("/v1/chat/completions", json=body, headers=WANTS_IDS) as response,
    ):
        call = response.headers["x-request-id"]
        old = events(response)
        first = await anext(old)
        coming = asyncio.create_task(rest(http, call, first.id))
        *_, last = [event async for event in old]
    whole = Joined([first, *await coming])
    assert whole.text[0] == whole.transcript[0] == SAID
    assert json.loads(last.data)["error"]["code"] == "taken_over"
    await empty(broker)


# --- status, and what can't be


async def test_how_a_call_stands(http: aiohttp.ClientSession, broker: Client) -> None:
    call, _ = await ask(http, n=2, modalities=BOTH)
    report = await status(http, call)
    assert report["object"] == "request"
    assert (report["id"], report["model"], report["kind"]) == (call, "echo", "chat")
    assert (report["status"], report["stored"]) == ("done", True)
    assert [choice["index"] for choice in report["choices"]] == [0, 1]
    for choice in report["choices"]:
        assert choice["status"] == "done"
        assert choice["outputs"] == {"text": 6, "audio": 6}
        assert choice["stages"].keys() == {"say", "tone"}
        assert choice["error"] is None
    await drop(http, call)
    await empty(broker)


async def test_a_stored_failure_is_told_again(http: aiohttp.ClientSession) -> None:
    fault = [{"raise": "on purpose", "at": 3}, None, None]
    call, got = await ask(http, sampling_params_list=fault)
    assert json.loads(got[-1].data)["error"]["code"] == "stage_failed"
    report = await status(http, call)
    assert report["status"] == "failed"
    assert report["choices"][0]["error"]["stage"] == "say"
    for path in ("stream", "result"):
        async with http.get(f"/v1/requests/{call}/{path}") as response:
            assert response.status == 500
            error = (await response.json())["error"]
        assert error["code"] == "stage_failed"
        assert error["request_id"] == call


@pytest.mark.parametrize("call", ["0" * 24, "x", "0" * 23 + "-", "%2e%2e", "0" * 24 + "-0"])
@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("GET", "/stream"), ("GET", "/result"), ("DELETE", "")]
)
async def test_unknown_calls_are_not_found(
    http: aiohttp.ClientSession, method: str, path: str, call: str
) -> None:
    async with http.request(method, f"/v1/requests/{call}{path}") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("after", ["x", "-1", "1.2", "1.", ".1", "1 ", "9" * 16, "１", "1.2.3.4"])
async def test_a_place_that_is_none_is_refused_and_harms_nobody(
    http: aiohttp.ClientSession, after: str
) -> None:
    call, got = await ask(http)
    async with http.get(f"/v1/requests/{call}/stream", params={"after": after}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "after"
    assert await rest(http, call, "0") == got
    assert await rest(http, call, "999") == []
    await drop(http, call)


# --- gateways that die


async def test_another_gateway_continues_what_a_killed_one_began(
    stack: Stack, http: aiohttp.ClientSession, broker: Client
) -> None:
    for fields in ({"n": 2, "stream_options": {"include_usage": True}}, {}):
        body = {"modalities": BOTH, "audio": SOUND, **fields}
        whole, undisturbed = await ask(http, **body)
        await drop(http, whole)
        body |= {**CHAT, "messages": ASK, "stream": True, "seed": 3}
        url = stack.another_gateway("second")
        async with (
            standing_still(broker, "echo", "tone"),
            http.post(f"{url}/v1/chat/completions", json=body, headers=WANTS_IDS) as response,
        ):
            call = response.headers["x-request-id"]
            old = events(response)
            got = [await anext(old) for _ in range(3)]
            stack.end("second", signal.SIGKILL)
            with pytest.raises(aiohttp.ClientPayloadError):
                got += [event async for event in old]
        assert Joined(got + await rest(http, call, got[-1].id)).all == Joined(undisturbed).all
    await empty(broker)
