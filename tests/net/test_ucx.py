"""Blocks by UCX: the same promises, over a way of its own; and what its open port gives to strangers."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading

import numpy as np
import pytest

from adapters.handle import AdapterError, BadHandle, BlockId
from adapters.net.fetch import Fetcher
from adapters.net.link import Link, Silent, Target
from adapters.net.wire import PIECE, Ticket
from tests.net.rig import FarHost, Process
from tests.net.test_failures import QUIET_S, where

pytest.importorskip("ucxx")

from adapters.net.ucx import KEY_BYTES, PART, STALLED_S, UcxLender, UcxPuller, _Far


@pytest.fixture
def no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What doesn't come by UCX doesn't come, but is asked for again; so servers have time to start it."""

    async def refuse(self: Link, handle: object, target: Target) -> None:
        raise Silent("no pieces in this test")

    monkeypatch.setattr(Link, "pull", refuse)


@pytest.mark.usefixtures("no_pieces")
async def test_blocks_of_any_size_arrive_whole_by_ucx(far: FarHost) -> None:
    fetcher = far.fetcher(*far.start(ucx=True).addresses)
    for nbytes in (1, 20_000, PIECE, PART, 3 * PART + 5):
        handle, sent = far.put(nbytes)
        assert bytes(await fetcher.fetch(handle, "ucx")) == sent
        far.arena.free(handle.block)


@pytest.mark.usefixtures("no_pieces")
async def test_many_blocks_come_at_a_time_by_ucx(far: FarHost) -> None:
    blocks = [far.put(nbytes) for nbytes in (PART + 1, 50, 2 * PIECE, 70_000, PIECE)] * 3
    fetcher = far.fetcher(*far.start(ucx=True).addresses)
    got = await asyncio.gather(*(fetcher.fetch(handle, "ucx") for handle, _ in blocks))
    assert [bytes(data) for data in got] == [sent for _, sent in blocks]


@pytest.mark.usefixtures("no_pieces")
async def test_large_blocks_go_by_ucx_where_both_hosts_have_it(far: FarHost) -> None:
    handle, sent = far.put(2 * PIECE)
    fetcher = far.fetcher(*far.start(ucx=True).addresses)
    assert bytes(await fetcher.fetch(handle)) == sent
    assert fetcher.carried.nbytes == {"ucx": len(sent)}


async def test_small_blocks_and_files_come_in_pieces(far: FarHost) -> None:
    handle, sent = far.put(20_000)
    place = far.store.put("request-1", memoryview(sent))
    stored = type(handle)("disk", BlockId(place, 0, 0), handle.nbytes, handle.dtype, handle.shape)
    fetcher = far.fetcher(*far.start(ucx=True).addresses)
    assert bytes(await fetcher.fetch(handle)) == sent
    assert bytes(await fetcher.fetch(stored, "ucx")) == sent
    assert fetcher.carried.blocks == {"zmq": 2}
    far.store.discard("request-1")


async def test_a_block_that_is_gone_is_bad_at_once(far: FarHost) -> None:
    handle, _ = far.put(PIECE)
    far.arena.free(handle.block)
    with pytest.raises(BadHandle, match="generation"):
        await far.fetcher(*far.start(ucx=True).addresses).fetch(handle, "ucx")


async def test_a_host_without_ucx_is_named_where_it_must_be_ucx(far: FarHost) -> None:
    handle, _ = far.put(PIECE)
    plain = [address for address in far.start(ucx=True).addresses if address.startswith("zmq")]
    with pytest.raises(AdapterError, match=far.name):
        await far.fetcher(*plain).fetch(handle, "ucx")


async def moving(fetcher: Fetcher, task: asyncio.Task[memoryview]) -> None:
    """Until a block is on its way by UCX."""
    puller = fetcher._puller
    while not isinstance(puller, UcxPuller) or not any(far.pulls for far in list(puller._fars.values())):
        assert not task.done()
        await asyncio.sleep(0)
        puller = fetcher._puller


async def warm(fetcher: Fetcher, far: FarHost, *servers: Process) -> None:
    """Until all these serve by UCX."""
    handle, _ = far.put(1)
    for server in servers:
        while (await _ticket(fetcher, where(server), handle)) is None:
            await asyncio.sleep(0.01)


async def _ticket(fetcher: Fetcher, address: str, handle: object) -> Ticket | None:
    try:
        return await fetcher._link(address).ticket(handle)  # type: ignore[arg-type]
    except Silent:
        return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_dies_or_stops_in_the_middle_leaves_the_block_to_the_next(
    far: FarHost, how: signal.Signals
) -> None:
    handle, sent = far.put(12 * PART)
    first, second = far.start(ucx=True), far.start(ucx=True)
    fetcher = far.fetcher(*first.addresses, *second.addresses, silence_s=QUIET_S)
    await warm(fetcher, far, first, second)
    task = asyncio.create_task(fetcher.fetch(handle, "ucx"))
    await moving(fetcher, task)
    first.signal(how)
    assert bytes(await task) == sent
    assert bytes(await fetcher.fetch(handle)) == sent
    first.close()
    assert isinstance(fetcher._puller, UcxPuller)
    while fetcher._puller._thread._watched:  # the memory that the first server could still have written to
        await asyncio.sleep(0.01)


async def test_a_fetch_that_is_given_up_disturbs_no_other(far: FarHost) -> None:
    large, sent = far.put(4 * PART)
    server = far.start(ucx=True)
    fetcher = far.fetcher(*server.addresses)
    await warm(fetcher, far, server)
    for _ in range(3):
        task = asyncio.create_task(fetcher.fetch(large, "ucx"))
        await moving(fetcher, task)
        task.cancel()
        assert bytes(await fetcher.fetch(large, "ucx")) == sent


async def test_where_ucx_does_not_get_through_blocks_come_in_pieces(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, sent = far.put(2 * PIECE)
    server = far.start(ucx=True)
    fetcher = far.fetcher(*server.addresses, silence_s=QUIET_S)
    await warm(fetcher, far, server)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        ask = Link.ticket

        async def elsewhere(self: Link, handle: object) -> Ticket:
            ticket = await ask(self, handle)  # type: ignore[arg-type]
            return Ticket(ticket.number, port, ticket.key, ticket.tag)

        monkeypatch.setattr(Link, "ticket", elsewhere)
        assert bytes(await fetcher.fetch(handle)) == sent
        assert where(server) in fetcher._by_pieces
        monkeypatch.setattr(Link, "ticket", None)
        assert bytes(await fetcher.fetch(handle)) == sent


# --- strangers


@pytest.fixture
def lender() -> UcxLender:
    return UcxLender()


async def test_what_is_pulled_in_the_moment_of_the_end_fails() -> None:
    puller = UcxPuller()
    puller.close()
    with pytest.raises(Silent, match="closed"):
        await asyncio.wait_for(
            puller.pull("127.0.0.1", Ticket(1, 1, bytes(KEY_BYTES), 0), memoryview(b"")), 60
        )


async def test_a_ticket_is_good_once(lender: UcxLender) -> None:
    data = memoryview(np.arange(1000, dtype=np.uint8))
    into = memoryview(bytearray(1000))
    puller = UcxPuller(silence_s=60)
    try:
        ticket = lender.lend(1, data)
        await puller.pull("127.0.0.1", ticket, into)
        assert into == data
        with pytest.raises(Silent):
            await puller.pull("127.0.0.1", ticket, memoryview(bytearray(1000)))
        wrong = Ticket(2, ticket.port, bytes(KEY_BYTES), ticket.tag)
        with pytest.raises(Silent):
            await puller.pull("127.0.0.1", wrong, memoryview(bytearray(1000)))
        await puller.pull("127.0.0.1", lender.lend(3, data), into)
    finally:
        puller.close()
        lender.close()


async def test_a_stranger_who_says_nothing_is_disconnected(lender: UcxLender) -> None:
    data = memoryview(np.arange(1000, dtype=np.uint8))
    port = lender.lend(1, data).port
    try:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        puller = UcxPuller()

        def visit() -> None:
            thread = puller._thread
            endpoint = thread.api.UCXEndpoint.create(thread.worker, "127.0.0.1", port, True)
            puller._fars["127.0.0.1", port] = _Far(("127.0.0.1", port), endpoint)

        came, listen = threading.Event(), lender._listen
        lender._listen = lambda guest: (came.set(), listen(guest))  # type: ignore[assignment, method-assign]
        puller._thread.call(visit)
        began = asyncio.get_running_loop().time()
        while not came.is_set() or lender._guests:  # it may be gone before we see it there
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began < STALLED_S, "as one who is known"
        puller.close()
        other = UcxPuller()
        into = memoryview(bytearray(1000))
        await other.pull("127.0.0.1", lender.lend(2, data), into)
        assert into == data
        other.close()
    finally:
        lender.close()
