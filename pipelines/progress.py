"""Telling people what takes so long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO

_LINE_EVERY_S = 5.0  # in a log; a terminal's line is rewritten


class Step(NamedTuple):
    """Where a longer piece of work stands."""

    subject: str  #: a model's name
    what: str  #: "download", "convert", ...
    done: int = 0  #: bytes
    total: int = 0  #: bytes, estimated; 0: unknown
    elapsed_s: float = 0.0  #: since this step began


Progress = Callable[[Step], None]


def quiet(step: Step) -> None:
    """Says nothing."""


class Console:
    """Progress for a terminal (one line, rewritten) or a log (a line now and then)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._rewrite = self._stream.isatty()
        self._what = ""
        self._written_at = 0.0

    def __call__(self, step: Step) -> None:
        """Shows a step."""
        what = f"{step.subject}: {step.what}"
        fresh = what != self._what
        now = time.monotonic()
        if not fresh and not self._rewrite and now - self._written_at < _LINE_EVERY_S:
            return
        amount = f" {step.done / 1e6:.0f} of about {step.total / 1e6:.0f} MB" if step.total else ""
        elapsed = f" ({step.elapsed_s:.0f} s)" if step.elapsed_s >= 1 else ""
        if self._rewrite:
            begin = "\n" if fresh and self._what else "\r"
            self._stream.write(f"{begin}{what}{amount}{elapsed}\x1b[K")
        else:
            self._stream.write(f"{what}{amount}{elapsed}\n")
        self._stream.flush()
        self._what, self._written_at = what, now

    def close(self) -> None:
        """Ends the line."""
        if self._rewrite and self._what:
            self._stream.write("\n")
            self._stream.flush()
        self._what = ""
