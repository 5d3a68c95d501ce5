"""What a client asks the broker for and gets one report on; asked again when the broker has been away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from broker.protocol import Inspect, Letters, Report

Question = Inspect | Letters

_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Questions:
    """Those that have no answer yet."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Question, asyncio.Future[dict[str, Any]]]] = {}

    async def ask(
        self, question: Question, post: Callable[[Question], None], timeout_s: float
    ) -> dict[str, Any]:
        """Posts it and waits for the answer. Raises TimeoutError."""
        report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[question.tag] = question, report
        post(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await report
        finally:
            del self._asked[question.tag]

    def answer(self, message: Report) -> None:
        """The report has come."""
        _, report = self._asked.get(message.tag, (None, None))
        if report is not None and not report.done():
            report.set_result(_decode(message.body))

    def open(self) -> list[Question]:
        """Those to be asked again."""
        return [question for question, _ in self._asked.values()]
