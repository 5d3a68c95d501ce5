"""A client whose TCP connection ends for a moment: what was under way is lost, its callers miss nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from broker.address import endpoints
from broker.client import Client
from broker.protocol import Attach
from broker.receiving import Receiving
from pipelines.graph import Limits
from scripts.ports import free_port
from tests.core.driver import chunk, line
from tests.wire.rig import Counter, Rig, Worker, eventually
from tests.wire.test_broken_links import Link
from tests.wire.test_flow_control import numbers


class Clients(Link):
    """The same for clients."""

    def __init__(self, broker: str) -> None:
        super().__init__(broker)
        self._port = urlsplit(endpoints(broker).clients).port
        self.loses = False  #: what comes from now on is lost

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if not self.loses:
                    sink.write(data)
                    await sink.drain()
        sink.close()

    async def open(self) -> None:
        await super().open()
        port = urlsplit(self.address).port
        assert port is not None
        self.address = f"tcp://127.0.0.1:{port - 1}"  # a client asks at the port after the workers'


def test_a_chunk_after_one_that_was_lost_is_not_taken_for_the_next() -> None:
    stream = Receiving(Attach(1, "a-request"), Limits())
    assert stream.push("out", chunk(0))
    assert not stream.push("out", chunk(2))
    assert stream.push("out", chunk(1))
    assert stream.push("out", chunk(2))


async def test_what_was_under_way_to_a_caller_comes_again(tmp_path: Path) -> None:
    engine = Counter(20, allowed=5)
    rig = Rig(tmp_path, line("a"))
    rig.broker.address = f"tcp://127.0.0.1:{free_port(2)}"
    await rig.start({})
    link = Clients(rig.broker.address)
    await link.open()
    worker = rig.workers["a"] = Worker(rig.broker.address, "a", engine)
    await worker.start()
    async with asyncio.timeout(60), Client(link.address, kind="gateway") as client:
        stream = await client.submit("line", outputs=["out"], given={"request": [{}]})
        assert await numbers(stream, 5) == list(range(5))
        link.loses = True
        engine.allow(10)
        await eventually(lambda: engine.yielded == 10, "the engine to yield")
        await asyncio.sleep(0.1)  # by then it is on the link
        link.loses = False
        link.pull()
        await asyncio.sleep(0.3)
        engine.allow(20)
        assert await numbers(stream) == list(range(5, 20))
        stream.done()
    await rig.close()
    await link.close()
