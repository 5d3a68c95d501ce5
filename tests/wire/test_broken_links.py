"""TCP connections that end: what was under way on them is lost, and nobody may go on as if it were not."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from broker.address import endpoints
from scripts.ports import free_port
from tests.core.driver import line
from tests.wire.rig import Counter, Rig, Worker, eventually


class Link:
    """A cable between workers and a broker's port, which can be pulled for a moment."""

    def __init__(self, broker: str) -> None:
        self._port = urlsplit(endpoints(broker).workers).port
        self._pipes: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def open(self) -> None:
        port = free_port(2)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"tcp://127.0.0.1:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        self._pipes.append((writer, forth))
        for source, sink in ((reader, forth), (back, writer)):
            task = asyncio.ensure_future(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    def pull(self) -> None:
        """All connections end, and new ones can be made at once."""
        pipes, self._pipes = self._pipes, []
        for pair in pipes:
            for writer in pair:
                writer.transport.abort()

    async def close(self) -> None:
        self.pull()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def linked(folder: Path, engine: Counter) -> tuple[Rig, Link, Worker]:
    rig = Rig(folder, line("a"))
    rig.broker.address = f"tcp://127.0.0.1:{free_port(2)}"
    await rig.start({})
    link = Link(rig.broker.address)
    await link.open()
    worker = rig.workers["a"] = Worker(link.address, "a", engine)
    await worker.start()
    return rig, link, worker


async def test_an_engine_whose_connection_broke_ends_for_another_to_begin(tmp_path: Path) -> None:
    rig, link, worker = await linked(tmp_path, Counter(4, allowed=2))
    stream = await rig.submit()
    for n in range(2):
        assert (await anext(stream))[1]["n"] == n
    link.pull()
    await eventually(worker.process.done.is_set, "the engine to end")
    stream.abort()
    worker.engine.allow(4)
    await rig.close()
    await link.close()


async def test_an_engine_whose_broker_was_restarted_goes_on(tmp_path: Path) -> None:
    rig, link, worker = await linked(tmp_path, Counter(4, allowed=2))
    stream = await rig.submit()
    for n in range(2):
        assert (await anext(stream))[1]["n"] == n
    await rig.restart()
    worker.engine.allow(4)
    async with stream:
        assert [payload["n"] async for _, payload in stream] == [2, 3]
    assert not worker.process.done.is_set()
    await rig.close()
    await link.close()
