"""What clients want: requests submitted and continued, outputs taken, questions answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from broker.core import report
from broker.core.state import Client, Request
from broker.protocol import (
    Abort,
    Attach,
    Forget,
    Inspect,
    Letters,
    Message,
    Peer,
    Report,
    Submit,
    Taken,
)

if TYPE_CHECKING:
    from broker.core.machine import Core

Handler = Callable[[float, Peer, Any], None]


class ClientDesk:
    """The handlers of messages that only a known client may send."""

    def __init__(self, core: Core) -> None:
        self._core = core
        requests = core.requests
        self.handlers: dict[type[Message], Handler] = {
            Submit: self._known(requests.submit),
            Attach: self._known(requests.attach),
            Inspect: self._known(self._inspect),
            Letters: self._known(self._letters),
            Abort: self._about(lambda request, m: requests.abort(request, leave=m.leave)),
            Forget: self._about(lambda request, m: requests.delivered(request)),
            Taken: self._about(lambda request, m: core.tasks.flow.taken(request, m.output, m.chunks)),
        }

    def _known(self, act: Callable[[Client, Any], None]) -> Handler:
        def handle(now: float, peer: Peer, m: Message) -> None:
            client = self._core.clients.get(peer)
            if client is None:
                self._core.stranger(peer, m)
            else:
                act(client, m)

        return handle

    def _about(self, act: Callable[[Request, Any], None]) -> Handler:
        """For messages about one request, which may be over by now."""

        def handle(now: float, peer: Peer, m: Any) -> None:
            client = self._core.clients.get(peer)
            request = client.requests.get(m.tag) if client is not None else None
            if request is not None:
                act(request, m)

        return handle

    def _inspect(self, client: Client, m: Inspect) -> None:
        core = self._core
        if m.what == "request":
            self._answer(client, m.tag, report.of_request(core, m.name))
        else:
            self._answer(client, m.tag, report.make(core, m.what, core.board.now))

    def _letters(self, client: Client, m: Letters) -> None:
        self._answer(client, m.tag, self._core.requests.letters.answer(m.act, m.name))

    def _answer(self, client: Client, tag: int, body: dict[str, Any]) -> None:
        self._core.board.send(client.peer, Report(tag, msgspec.Raw(msgspec.msgpack.encode(body))))
