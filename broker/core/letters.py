"""The dead letters: requests that have failed for good, kept with their inputs for a person to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from adapters.handle import Chunk
from broker.core.admission import given_handles
from broker.core.board import Board
from broker.core.state import Request

SHARE = 8  #: of the memory that may be in use, dead letters may hold one


class DeadLetters:
    """A list of bounded length and bounded memory; the oldest go first.

    Args:
        board: Tells the time, and how much memory there is.
        most: How many are kept.
        forget: Called for one that goes.
        retry: Called for one that is to be submitted again, under its name.
    """

    def __init__(
        self, board: Board, most: int, *, forget: Callable[[Request], None], retry: Callable[[Request], None]
    ) -> None:
        self._board = board
        self._most = most
        self._forget = forget
        self._retry = retry
        self._letters: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._letters)

    def may_keep(self, request: Request) -> bool:
        """Whether there is room for it at all, were it the only one."""
        return self._most > 0 and _held(request) <= self._most_bytes

    def add(self, request: Request) -> None:
        """One more, which may be kept."""
        self._letters[request.number] = request
        while len(self._letters) > self._most or sum(map(_held, self._letters.values())) > self._most_bytes:
            self._forget(next(iter(self._letters.values())))

    @property
    def _most_bytes(self) -> int:
        return self._board.most_bytes // SHARE

    def remove(self, request: Request) -> None:
        """It is forgotten, or runs again; nothing happens if it is no dead letter."""
        self._letters.pop(request.number, None)

    def answer(self, act: str, name: str) -> dict[str, Any]:
        """What :class:`broker.protocol.Letters` asks for."""
        if act == "list":
            return {"letters": [self._describe(letter) for letter in self._letters.values()]}
        every = name == "all" and act == "drop"
        chosen = [letter for letter in self._letters.values() if every or letter.name == name]
        if act == "drop":
            for letter in chosen:
                self._forget(letter)
            return {"dropped": len(chosen)}
        if not chosen:
            return {"error": f"no dead letter {name!r}"}
        if act == "show":
            return {"letter": self._describe(chosen[0]) | _contents(chosen[0])}
        self._retry(chosen[0])
        return {"name": name}

    def _describe(self, letter: Request) -> dict[str, Any]:
        ended = letter.ended
        error = ended.error if ended is not None else None
        return {
            "name": letter.name,
            "pipeline": letter.pipeline.name,
            "stage": error.stage if error else None,
            "attempts": error.attempts if error else 0,
            "error": error.message if error else "",
            "age_s": round(self._board.now - letter.left, 3),
            "bytes": _held(letter),
        }


def _held(letter: Request) -> int:
    """Bytes of tensors that a dead letter keeps."""
    return sum(handle.nbytes for handle in given_handles(letter.submit))


def _contents(letter: Request) -> dict[str, Any]:
    submit = letter.submit
    given = {name: [_shape(chunk) for chunk in chunks] for name, chunks in submit.given.items()}
    params = {stage: msgspec.msgpack.decode(raw) for stage, raw in submit.params.items()}
    return {"outputs": submit.outputs, "params": params, "given": given, "call": submit.call}


def _shape(chunk: Chunk) -> dict[str, Any]:
    return {"bytes": len(chunk.body), "tensors": [list(handle.shape) for handle in chunk.handles]}
