"""Clients come, and want things: requests submitted and continued, outputs taken, questions answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from broker.core import admission, report
from broker.core.find import version_mismatch
from broker.core.records import ClientMet
from broker.core.state import Client, Request
from broker.protocol import (
    VERSION,
    Abort,
    Attach,
    Busy,
    Connect,
    Connected,
    Forget,
    Inspect,
    Letters,
    Message,
    Peer,
    Reject,
    Report,
    Submit,
    Taken,
    Unplaced,
    Who,
)

if TYPE_CHECKING:
    from broker.core.machine import Core

Handler = Callable[[float, Peer, Any], None]


class ClientDesk:
    """The handlers of their messages."""

    def __init__(self, core: Core) -> None:
        self._core = core
        requests = core.requests
        self.handlers: dict[type[Message], Handler] = {
            Connect: self._on_connect,
            Submit: self._known(requests.submit),
            Attach: self._known(requests.attach),
            Inspect: self._known(self._inspect),
            Letters: self._known(self._letters),
            Unplaced: self._known(self._unplaced),
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

    def _on_connect(self, now: float, peer: Peer, m: Connect) -> None:
        core = self._core
        if m.version != VERSION:
            core.board.send(peer, Reject(version_mismatch("client", m.version)))
            return
        if not core.may_own(m.arena):
            core.board.send(peer, Reject(f"{m.arena!r} is no arena of this run"))
            return
        client = core.clients.get(peer)
        if client is None and m.met:  # we have given it up, or a broker before us
            core.board.send(peer, Who(core.boot, gone=True))
            return
        if client is None:
            client = core.clients[peer] = Client(peer, m.kind, now)
        if client.arena != m.arena and not client.arena:  # it can name its arena only when it knows our run
            client.arena = m.arena
            core.know_again(peer)
        client.shm_host, client.store_host, client.data = place = m.shm_host, m.store_host, m.data
        core.board.log.peer(peer, ClientMet(client.kind, client.arena, *place))
        specs = [p.spec for p in core.board.pipelines.values()]
        about = core.boot, core.store, core.hosts.here
        core.board.send(peer, Connected(VERSION, core.run, specs, core.settings.beat_s, *about))
        if peer not in core.awaited:
            core.hosts.tell(peer)
        core.hosts.met(client)
        for pipeline in core.board.pipelines.values():
            if pipeline.busy and client.kind == "gateway":
                core.board.send(peer, Busy(pipeline.name, admission.retry_after(pipeline)))

    def _inspect(self, client: Client, m: Inspect) -> None:
        core = self._core
        if m.what == "request":
            self._answer(client, m.tag, report.of_request(core, m.name))
        elif m.what == "stored":
            self._answer(client, m.tag, report.of_stored(core, m.name))
        else:
            self._answer(client, m.tag, report.make(core, m.what, core.board.now))

    def _letters(self, client: Client, m: Letters) -> None:
        self._answer(client, m.tag, self._core.requests.letters.answer(m.act, m.name))

    def _unplaced(self, client: Client, m: Unplaced) -> None:
        client.unplaced = m.stages

    def _answer(self, client: Client, tag: int, body: dict[str, Any]) -> None:
        self._core.board.send(client.peer, Report(tag, msgspec.Raw(msgspec.msgpack.encode(body))))
