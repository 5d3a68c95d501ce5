"""Guidance in parallel: the negative rows are computed by a second process at the same time as the others.

The second process (:mod:`workers.engines.diffusion.rank`) has a copy of the model, on a GPU of its own where
there are two. It begins each canvas itself, from the same inputs, so that later only latents cross the
border: a few hundred KiB in each step, over a socket that these two alone hold an end of. It dies with the
engine, and the engine with it: the guardian starts both again, and the requests go on from their checkpoints.
"""

from __future__ import annotations

import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from adapters.chunk import Chunk, Payload, pack, unpack
from adapters.process import describe_exit, dies_with_parent, python
from pipelines.graph import Stage
from workers.engine import ItemError
from workers.engines.diffusion.family import NEGATIVE, Canvas, Row, Wishes
from workers.engines.diffusion.passes import Passes, Said
from workers.engines.diffusion.tensors import as_tensor, copied

_LENGTH = struct.Struct("<Q")  # of the message behind it, bytes
_END_S = 10.0  #: how long the second process may take to end


class RankEnded(RuntimeError):
    """The second process is gone."""


def send(line: socket.socket, message: Payload) -> None:
    """Sends a message: a payload whose tensors are on the CPU. Raises OSError when nobody is there."""
    body = bytes(pack(message, 0, None).body)
    line.sendall(_LENGTH.pack(len(body)) + body)


def receive(line: socket.socket) -> Payload | None:
    """Waits for a message; its tensors are read-only. None: the other side has ended."""
    head = _exactly(line, _LENGTH.size)
    body = _exactly(line, *_LENGTH.unpack(head)) if head else b""
    return unpack(Chunk(0, False, msgspec.Raw(body)), None, lambda block: None) if body else None


def _exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes; none when the other side ends before."""
    buffer = bytearray(count)
    view, got = memoryview(buffer), 0
    while got < count:
        try:
            received = line.recv_into(view[got:])
        except ConnectionResetError:
            received = 0
        if not received:
            return b""
        got += received
    return bytes(buffer)


class Rank:
    """The second process. It is started here, and :meth:`ready` waits until it has loaded.

    Args:
        stage: As this process has it.
        device: Of the copy of the model.
    """

    def __init__(self, stage: Stage, device: str) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                python("workers.engines.diffusion.rank", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # The thread that starts it lives as long as the engine does. What runs between fork and exec
                # takes no lock.
                preexec_fn=dies_with_parent(),  # noqa: PLW1509
            )
        self.tell({"stage": msgspec.to_builtins(stage), "device": device})

    def ready(self) -> None:
        """Waits until the model is loaded. Raises RankEnded if it can't be; the reason is in the log."""
        self.answer()

    def tell(self, message: Payload) -> None:
        """Raises RankEnded."""
        try:
            send(self._line, message)
        except OSError:
            raise self._ended() from None

    def answer(self) -> Payload:
        """Waits for it. Raises RankEnded."""
        message = receive(self._line)
        if message is None:
            raise self._ended()
        return message

    def close(self) -> None:
        """It ends, and is waited for."""
        self._line.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ended(self) -> RankEnded:
        self.close()
        return RankEnded(f"the second rank ended with {describe_exit(self.process.returncode)}")


class ParallelPasses:
    """Rows of negative branches go to the second process, the others are computed here meanwhile."""

    def __init__(self, passes: Passes, rank: Rank) -> None:
        self._passes = passes
        self._rank = rank
        self._numbers: dict[Canvas, int] = {}  # of the canvases that the second process knows
        self._begun = 0

    def begin(
        self, canvas: Canvas, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int, state: Payload
    ) -> None:
        """The second process begins it too, if it has a negative branch."""
        self._passes.restore(_ours(canvas.rows), state)
        if NEGATIVE not in canvas.conditions:
            return
        self._begun += 1
        self._numbers[canvas] = self._begun
        self._rank.tell(
            {
                "do": "begin",
                "number": self._begun,
                "inputs": dict(inputs),
                "wishes": msgspec.to_builtins(wishes),
                "seed": seed,
                "state": state,
            }
        )

    def __call__(self, rows: Sequence[Row]) -> Said:
        """Raises RankEnded: without the second process the engine is none."""
        theirs = [row for row in rows if row.branch == NEGATIVE]
        if theirs:
            self._rank.tell({"do": "compute", "canvases": [self._place(row.canvas) for row in theirs]})
        said = self._passes(_ours(rows))
        for row, result in zip(theirs, self._rank.answer()["said"] if theirs else (), strict=True):
            said[row] = _error(result) if isinstance(result, dict) else _tensor(result, row)
        return said

    def state(self, rows: Sequence[Row]) -> Payload:
        """Of all rows; for negative ones the second process is asked."""
        state = self._passes.state(_ours(rows))
        for row in rows:
            if row.branch == NEGATIVE and self._passes.cache is not None:
                self._rank.tell({"do": "state", "number": self._numbers[row.canvas]})
                state |= self._rank.answer()
        return state

    def forget(self, canvas: Canvas) -> None:
        """The second process forgets it too."""
        self._passes.forget(canvas)
        number = self._numbers.pop(canvas, None)
        if number is not None:
            self._rank.tell({"do": "forget", "number": number})

    def close(self) -> None:
        """Ends the second process."""
        self._rank.close()

    def _place(self, canvas: Canvas) -> Payload:
        return {
            "number": self._numbers[canvas],
            "step": canvas.step,
            "latents": copied(canvas.latents),
        }


def _ours(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.branch != NEGATIVE]


def _tensor(value: Any, row: Row) -> Any:
    return as_tensor(value).to(row.canvas.latents.device)


def _error(told: dict[str, Any]) -> Exception:
    return ItemError(told["error"], status=told["status"], param=told["param"])
