"""Callers of streamed chats that come back when their connection is gone, and count what they miss."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp

from scripts.benchmarks.house import message_of

PATIENCE_S = 120.0  #: a stream that brings nothing for so long is lost
PAUSE_S = 0.05  #: before a caller comes back
TOLD = "error in the stream"  #: what Lost begins with where the server said itself that no more comes
ACCEPT = {"Accept": "text/event-stream"}  #: says that we look at events' ids
IN_FLIGHT_S = 0.02  #: what arrives so soon after a death was on its way before it


class Lost(Exception):
    """The answer did not reach its end; the message says why."""


class Death(NamedTuple):
    """A process that was killed or stopped, as the callers see it."""

    kind: str
    at: float  #: time.monotonic()


class Resumed(NamedTuple):
    """The seconds from a death to the next event of a stream that it touched."""

    pipeline: str
    kind: str
    seconds: float


class Answer(NamedTuple):
    """What came of one request."""

    text: str
    audio: bytes


class Caller:
    """One streamed request.

    Args:
        session: For its connections.
        url: The gateway.
        body: The chat's body; ``stream: true`` in it.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        self.body = body
        self.duplicated = 0  #: events that came twice
        self.gaps = 0  #: events that never came
        self.comebacks = 0  #: connections that were lost and made again
        self.posted = 0  #: times that the request was made: more than once if nothing was known of the first
        self.resumed: list[Resumed] = []
        self._session = session
        self._url = url
        self._id = ""
        self._last = ""
        self._text: list[str] = []
        self._audio: list[bytes] = []
        self._done = False
        self._moved = 0.0
        self._response: aiohttp.ClientResponse | None = None
        self._deaths: list[tuple[Death, str]] = []

    async def run(self) -> Answer:
        """The whole answer. Raises :class:`Lost`."""
        self._moved = time.monotonic()
        while not self._done:
            try:
                async with self._request() as response:
                    await self._take(response)
            except aiohttp.ClientConnectorError:
                self.posted -= not self._id  # nobody was there
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # it comes back
            finally:
                self._response = None
            if self._done:
                break
            if time.monotonic() - self._moved > PATIENCE_S:
                raise Lost(f"nothing came for {PATIENCE_S:g} s")
            self.comebacks += 1
            await asyncio.sleep(PAUSE_S)
        return Answer("".join(self._text), b"".join(self._audio))

    async def forget(self) -> None:
        """Tells the server, as soon as it is there, that the answer need not be kept."""
        deadline = time.monotonic() + PATIENCE_S
        while self._id and time.monotonic() < deadline:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._session.delete(f"{self._url}/v1/requests/{self._id}") as answer:
                    if answer.status != 503:
                        return
            await asyncio.sleep(PAUSE_S)

    # --- what the deaths are told

    @property
    def streaming(self) -> bool:
        """Whether some of the answer is here and not all."""
        return bool(self._text or self._audio) and not self._done

    @property
    def got(self) -> tuple[int, int]:
        """Characters of text and bytes of audio so far."""
        return sum(map(len, self._text)), sum(map(len, self._audio))

    def touched(self, death: Death, output: str = "") -> None:
        """The next event (with ``output``, if it is named) is what the death kept from coming."""
        self._deaths.append((death, output))

    def cut(self) -> bool:
        """Closes the connection; False when there is none."""
        if self._response is None or self._response.connection is None:
            return False
        transport = self._response.connection.transport
        if transport is not None:
            transport.abort()
        return transport is not None

    # --- the connection

    def _request(self) -> Any:
        timeout = aiohttp.ClientTimeout(sock_connect=5.0, sock_read=PATIENCE_S)
        if not self._id:
            self.posted += 1
            chat = f"{self._url}/v1/chat/completions"
            return self._session.post(chat, json=self.body, headers=ACCEPT, timeout=timeout)
        headers = ACCEPT | ({"Last-Event-ID": self._last} if self._last else {})
        path = f"/v1/requests/{self._id}/stream"
        return self._session.get(self._url + path, headers=headers, timeout=timeout)

    async def _take(self, response: aiohttp.ClientResponse) -> None:
        if response.status in (429, 503):
            await asyncio.sleep(float(response.headers.get("Retry-After", "1")))
            return
        if response.status != 200:
            raise Lost(f"HTTP {response.status}: {message_of(await response.text())}")
        self._id = self._id or response.headers.get("x-request-id", "")
        self._response = response
        async for name, data in events(response):
            self._moved = time.monotonic()
            if not self._in_order(name):
                continue
            if data == "[DONE]":
                self._done = True
                return
            self._read(json.loads(data))

    def _in_order(self, name: str) -> bool:
        """Counts what is missing before an event. False for one that was here already.

        An event's id has a count for each part of the answer that has an order of its own, like "3.5": each
        event adds one to one of them.
        """
        if not name:
            return True
        place = [int(count) for count in name.split(".")]
        known = [int(count) for count in self._last.split(".")] if self._last else [0] * len(place)
        steps = [now - before for now, before in zip(place, known, strict=True)]
        if min(steps) < 0 or not any(steps):
            self.duplicated += 1
            return False
        self.gaps += sum(steps) - 1
        self._last = name
        return True

    def _read(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise Lost(f"{TOLD}: {event['error'].get('message')}")
        brought = {""}
        for choice in event["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                self._text.append(delta["content"])
                brought.add("text")
            if data := (delta.get("audio") or {}).get("data"):
                self._audio.append(base64.b64decode(data))
                brought.add("audio")
        waiting, self._deaths = self._deaths, []
        for death, output in waiting:
            seconds = self._moved - death.at
            if output in brought and seconds > IN_FLIGHT_S:
                self.resumed.append(Resumed(self.body["model"], death.kind, seconds))
            else:
                self._deaths.append((death, output))


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """The id ("" without one) and the data of each server-sent event."""
    name = data = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("id:"):
            name = line[3:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
        elif not line and data:
            yield name, data
            name = data = ""
