"""vLLM's engine on one thread of this process, as async generators of token ids.

Why not vLLM's AsyncLLM: it puts the engine core, and on a CPU the model too, into processes of their own.
When this process is killed by SIGKILL they live on (seen more than ten minutes later, with their memory).
In one process there is nothing to leave behind, and on a CPU it needs a third less memory and a third less
CPU time a token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from workers.engine import ItemError
from workers.engines.engine_thread import EngineThread


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it won't take."""
    from vllm.exceptions import VLLMValidationError

    return (ValueError, VLLMValidationError)


class Delta(NamedTuple):
    """What one step gave one request."""

    token_ids: list[int]
    finish_reason: str | None  #: "stop" (the last token says so) or "length" in the last one
    #: [k, layers, hidden] on the CPU: rows of ``hidden_layers`` up to the last token's; None without them
    hidden: Any = None


class VllmThread(EngineThread):
    """Owns an ``LLMEngine``: builds it, steps it while there is work, sleeps otherwise."""

    engine: Any  #: after :meth:`start`; reading its configuration is safe from anywhere

    def __init__(self, build: Callable[[], Any], hidden_layers: Sequence[int] = ()) -> None:
        super().__init__("vllm")
        self._build = build
        self._hidden_layers = hidden_layers
        self._take_rows: Callable[[], dict[str, Any]] = dict
        self._sinks: dict[str, asyncio.Queue[Delta | Exception]] = {}
        self._names = map(str, itertools.count())

    @property
    def unfinished(self) -> int:
        """Requests that vLLM works on or holds."""
        return int(self.engine.get_num_unfinished_requests())

    async def generate(
        self, inputs: dict[str, Any], params: Any, rows_from: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Tokens as they are made. Leaving early, also by cancellation, frees the request at once.

        Args:
            inputs: vLLM's ``EngineInput``: {"type": "token", "prompt_token_ids"}, or with features of media.
            params: vLLM's ``SamplingParams``.
            rows_from: Place of the first row, where there are hidden layers. Rows that nobody has taken yet
                wait here, at most a context full.

        Raises :class:`ItemError` (400) if vLLM refuses the request.
        """
        name = next(self._names)
        if self._hidden_layers:
            params.extra_args = {"kv_transfer_params": {"rows_for": name, "rows_from": rows_from}}
        sink = self._sinks[name] = asyncio.Queue()
        self.command(lambda: self._add(name, inputs, params))
        finished = False
        try:
            while not finished:
                delta = await sink.get()
                if isinstance(delta, Exception):
                    raise delta
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._sinks[name]
            if not finished:
                self.command(lambda: self.engine.abort_request([name]))

    # --- on the thread

    def load(self) -> None:
        """Builds the engine."""
        self.engine = self._build()
        if self._hidden_layers:
            from workers.engines.vllm_hidden import connect

            self._take_rows = connect(self.engine, self._hidden_layers).take

    def serve(self) -> None:
        """Steps while vLLM has requests, then lets the model go."""
        while self.obey(0.0 if self.engine.has_unfinished_requests() else None):
            if self.engine.has_unfinished_requests() and (deltas := self._step()):
                self.tell(self._deliver, deltas)
        self.engine.engine_core.shutdown()
        del self.engine

    def _add(self, name: str, inputs: dict[str, Any], params: Any) -> None:
        try:
            self.engine.add_request(name, inputs, params)
        except refusals() as error:
            self.tell(self._deliver, [(name, ItemError(str(error), status=400))])

    def _step(self) -> list[tuple[str, Delta]]:
        outputs = self.engine.step()
        rows = self._take_rows()
        deltas = []
        for output in outputs:
            answer, name = output.outputs[0], output.request_id
            deltas.append((name, Delta(list(answer.token_ids), answer.finish_reason, rows.get(name))))
        return deltas

    # --- on the event loop

    def _deliver(self, deltas: list[tuple[str, Delta | Exception]]) -> None:
        for name, delta in deltas:
            if name in self._sinks:
                self._sinks[name].put_nowait(delta)
