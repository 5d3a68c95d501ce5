"""What the broker says to an engine that its guardian has spoken of, before the engine has a connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from broker.address import endpoints
from broker.estate import Estate
from broker.protocol import VERSION, Beat, Hello, Message, Peer, Ready, encode, new_peer
from broker.server import Server
from tests.core.driver import line
from tests.wire.rig import eventually
from tests.wire.test_hostile_peers import dealer


class Answering(Server):
    """Something happens right after its first message to a peer."""

    peer: Peer
    then: Callable[[], None] | None

    def _send(self, peer: Peer, messages: list[Message]) -> bool:
        sent = super()._send(peer, messages)
        if peer == self.peer and self.then is not None:
            then, self.then = self.then, None
            then()
            assert self._ports[peer[0]].socket.poll(60_000), "nothing came"
        return sent


async def test_an_engine_that_reports_just_after_an_answer_missed_it_is_not_taken_for_cut_off(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    where = endpoints(f"ipc://{tmp_path}/run")
    guardian, engine = new_peer("g"), new_peer("w")
    estate = Estate([line("a")], None)
    server = Answering(estate, [where])
    serving = asyncio.ensure_future(server.run())
    with ExitStack() as stack:

        def report() -> None:
            reports = stack.enter_context(dealer(where.workers, engine))
            reports.send(encode([Ready(VERSION, guardian, 8, os.getpid())]))

        server.peer, server.then = engine, report
        spoken = stack.enter_context(dealer(where.workers, guardian))
        spoken.send(encode([Hello(VERSION, "", "a", "here", os.getpid()), Beat([engine])]))
        await eventually(lambda: engine in server.core.workers, "the engine to be known")
        await asyncio.sleep(0)  # whatever is due follows
        assert server.then is None
        assert not server.core.workers[engine].draining
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    estate.close()
