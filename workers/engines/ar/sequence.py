"""One job inside the engine: its rows, how many of them are computed, and its place in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

from workers.engines.ar.family import Prompt, Step

if TYPE_CHECKING:
    import torch

    from workers.engines.ar.sampling import Seen

#: Steps that a job may be ahead of whoever takes its payloads.
AHEAD = 8


class Choice(NamedTuple):
    """How a job's tokens are chosen: Hugging Face's parameters, all of them given."""

    seed: int
    temperature: float = 1.0  #: 0: greedy
    top_k: int = 0  #: 0: off
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False


class Sequence:
    """A job's rows are its prompt's and one for each token so far. Changed by the engine's thread alone."""

    def __init__(
        self,
        name: str,
        prompt: Prompt,
        choice: Choice,
        limit: int,
        *,
        written: SequenceOf[SequenceOf[int]] = (),
        streamed: bool = False,
        rest: torch.Tensor | None = None,
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.prompt_rows = prompt.rows
        self.choice = choice
        self.limit = limit  #: tokens at most, those written by earlier attempts included
        self.codes: list[list[int]] = [list(codes) for codes in written]  #: of the tokens so far
        self.streamed = streamed  #: needs a row for each generated token's input
        self.rows: list[torch.Tensor] = []  #: those that came, [hidden] each
        self.rows_ended = False
        self.rest = rest  #: stands in for rows after the last one
        self.computed = 0  #: rows whose keys and values are in memory
        self.blocks: list[int] = []
        self.sound = True  #: what was last computed gave finite logits, so there is no NaN in its blocks
        self.block_names: list[bytes] | None = None  #: of the prompt's (see the prefixes); None: not made yet
        #: Rows whose hidden states are out: of a resumed job, all but the one of its last token.
        self.handed_out = self.prompt_rows + len(self.codes) - 1 if self.codes else 0
        self.held: dict[int, list[torch.Tensor]] = {}  #: hidden states until the next token: layer -> pieces
        self.seen: Seen | None = None  #: made when it is first needed
        self.arrival = 0
        self.made = 0  #: steps given out, and
        self.taken = 0  #: how many of them were looked at (counted by the event loop)
        self.sink: asyncio.Queue[Step | Exception] = asyncio.Queue()

    @property
    def total(self) -> int:
        """Rows that the next token depends on."""
        return self.prompt_rows + len(self.codes)

    @property
    def pending(self) -> int:
        """Rows that can be computed now."""
        known = len(self.codes)
        if self.streamed and not (self.rows_ended and self.rest is not None):
            known = min(known, len(self.rows))
        return self.prompt_rows + known - self.computed

    @property
    def fed(self) -> bool:
        """Another stage is still making rows for it."""
        return self.streamed and not self.rows_ended

    @property
    def wanted(self) -> bool:
        """Somebody takes its tokens."""
        return self.made - self.taken < AHEAD

    @property
    def ready(self) -> bool:
        """There is something to compute, and somebody takes it."""
        return self.wanted and self.pending > 0

    def row(self, token: int) -> torch.Tensor | None:
        """The streamed row that belongs to a token's input."""
        if not self.streamed:
            return None
        return self.rows[token] if token < len(self.rows) else self.rest
