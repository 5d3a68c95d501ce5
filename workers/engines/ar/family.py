"""What a model brings to the engine ``ar``: one subclass of :class:`Model` in a file of its own.

The engine knows tokens, memory and time; a model knows its inputs, its decoder and what becomes of tokens.

A job is a prompt of ``n`` rows and what is generated after it. Step i makes token i. Its input is the last
row of the prompt for i = 0, and for later i the row ``embed(token i-1, row i-1)``, where rows come over a
streaming edge if the model has such. With several codebooks a step's token is the first code of a frame, and
``codes`` makes the others from it.

Threads: ``begin`` and ``Output`` run on the event loop; everything else, the constructor too, on the
engine's own thread. What touches weights within ``begin`` goes through ``await self.call(function, ...)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import Job

if TYPE_CHECKING:
    import torch

    from workers.engines.ar.sampling import Draws


class Layout(NamedTuple):
    """What of a decoder decides the size of its key-value memory."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Layout:
        """From a transformers text config."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, kv_heads, head_dim, dtype)


@dataclass
class Prompt:
    """The rows that a job begins with.

    Either ``embeds`` says what they are, or the rows are ``embed(ids, None)``.
    """

    #: Tokens that the repetition penalty looks at, as transformers' ``input_ids``. With ``embeds`` there may
    #: be any number of them, none too.
    ids: Sequence[int]
    embeds: torch.Tensor | None = None  #: [n, hidden]
    positions: torch.Tensor | None = None  #: int or float32 [axes, n]; None: 0..n-1 on each axis
    next_position: float | None = None  #: of the first generated token, on all axes; None: n
    #: int [axes, m]: where the m generated tokens stand, for answers whose length is known and that are no
    #: line (the rows and columns of a picture). None: one after the other from ``next_position`` on
    answer_positions: torch.Tensor | None = None
    #: More for :meth:`Model.forward`, row by row: name -> [n, ...]. For rows of other jobs and of generated
    #: tokens they are zero; a step without any of them gets none.
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """n"""
        return len(self.ids) if self.embeds is None else int(self.embeds.shape[0])


class Step(NamedTuple):
    """What one step made for one job."""

    token: int
    codes: list[int]  #: [q], the frame whose first code is the token; just the token for models without codes
    #: Layer -> [k, hidden], on the CPU: rows of ``hidden_layers`` that were not handed out yet. In the first
    #: step these are the rows of the prompt, in step i > 0 the one row whose input was token i-1. A resumed
    #: job begins with the row of the last token that is out.
    hidden: dict[int, torch.Tensor]
    #: "stop": the token is a stop id (it has no codes). "length": the limit is reached. None: more comes.
    finish: str | None


class Output(Protocol):
    """Makes a job's payloads. One for each job, with whatever state it needs."""

    def push(self, step: Step) -> Payload | None:
        """Takes one step; what goes out now, or None for nothing yet. All is out after a ``finish``.

        The payload that goes out with the last step must carry "finish_reason".
        """
        ...

    @property
    def stopped(self) -> bool:
        """It needs no more steps, for a reason of its own (a stop string); its last payload said so."""
        ...


@dataclass
class Work:
    """A job, ready to be computed."""

    prompt: Prompt
    output: Output
    #: Of the request; the engine reads those of :class:`workers.engines.ar.sampling.SamplingParams`.
    params: dict[str, Any]
    #: What earlier attempts got out, token by token: the codes of each step, [q] (see ``Step.codes``).
    written: Sequence[Sequence[int]] = ()
    #: Rows of a streaming edge, [k, hidden] at a time, from row 0 on in every attempt. A job whose next row
    #: has not come waits. Read no further ahead than a bound, so that the producer is held back.
    rows: AsyncIterator[torch.Tensor] | None = None
    rest: torch.Tensor | None = None  #: [hidden], the row of all steps after ``rows`` has ended


class Forward(NamedTuple):
    """What a pass over T rows gives."""

    last: torch.Tensor  #: [T, hidden], what ``logits`` takes
    #: transformers' ``hidden_states`` where layers are wanted: [0] the inputs, [i] after layer i, the last
    #: one after the final norm; each [1, T, hidden] or [T, hidden]
    hidden: Sequence[torch.Tensor] = ()


class Model(ABC):
    """Base of a stage's model file. Named by ``options.family`` as "package.module:Class".

    The constructor loads the weights and sets the attributes below. What it raises is fatal for the process.
    """

    layout: Layout
    decoder: Any  #: a transformers decoder ("...TextModel"), set up with :func:`attention.use_pages`
    axes: int = 1  #: of positions; 3 for M-RoPE
    max_positions: int  #: what the decoder was made for, prompt and answer
    stop_ids: Sequence[int] = ()
    #: A request that ignores them gets them as tokens like others. False: they can't be such (a code without
    #: a sound), so it never gets them.
    stops_are_tokens: bool = True
    suppressed_ids: Sequence[int] = ()
    hidden_layers: Sequence[int] = ()  #: captured for ``Step.hidden``; the option of that name adds to them
    codebooks: int = 1  #: q, codes that :meth:`codes` makes of a token, itself included
    #: Sampling parameters of requests that don't give them, by the names of SamplingParams.
    defaults: Mapping[str, Any] = MappingProxyType({})
    #: Set by the engine: runs a function on its thread, between two steps. What it raises, the caller gets.
    call: Callable[..., Awaitable[Any]]

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        self.folder = folder
        self.options = options
        self.device = device

    @abstractmethod
    async def begin(self, job: Job) -> Work | None:
        """Reads a job's inputs, as far as they are needed before its first step. None: all of it is out.

        Raises ItemError for the job's own faults. Never changes the inputs' order between attempts.
        """

    @abstractmethod
    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Input rows of generated tokens: codes int [B, q] and rows [B, hidden] -> [B, hidden]."""

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, cache: Any, extras: dict[str, torch.Tensor]
    ) -> Forward:
        """Rows of all jobs of a step, packed: embeds [T, hidden], positions int or float32 [axes, T].

        The decoder's attention finds the keys and values of each row's own job through ``cache``, which has
        to reach it as the keyword ``cache``; transformers' decoders pass unknown keywords on.
        """
        out = self.decoder(
            inputs_embeds=embeds[None],
            position_ids=positions if self.axes == 1 else positions[:, None],
            use_cache=False,
            cache=cache,
            output_hidden_states=bool(self.hidden_layers),
            **extras,
        )
        return Forward(out.last_hidden_state[0], out.hidden_states or ())

    @abstractmethod
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, vocab], any float dtype."""

    def codes(self, last: torch.Tensor, tokens: torch.Tensor, draws: Draws) -> torch.Tensor:
        """All codes of the frames that begin with these tokens: [B, hidden] and int [B] -> int [B, q].

        ``draws.pick(logits [B, vocab], codebook, ...)`` chooses; it is greedy for jobs that are.
        """
        return tokens[:, None]
