"""Servers that die, fall silent or come back; blocks that are gone; fetches that are given up."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest
import zmq

from adapters.disk import DiskStore
from adapters.handle import AdapterError, BadHandle, Unreachable
from adapters.net.fetch import Fetcher
from adapters.net.link import Link
from adapters.net.wire import PIECE, WINDOW, Piece, Want, decode_question, encode
from tests.net.rig import OTHER_RUN, FarHost, Process

QUIET_S = 0.3  #: a server that says nothing for so long is given up, in these tests


def where(server: Process) -> str:
    """IP:PORT."""
    return server.addresses[0].removeprefix("zmq://")


async def under_way(fetcher: Fetcher, task: asyncio.Task[memoryview]) -> None:
    """Until a piece of a block has come."""

    def heard(link: Link) -> bool:
        return any(asked.pull.target.here for asked in link._asked.values())

    while not any(heard(link) for link in fetcher._links.values()):
        assert not task.done()
        await asyncio.sleep(0)


async def test_a_server_that_is_killed_in_the_middle_leaves_the_rest_to_the_next(far: FarHost) -> None:
    handle, sent = far.put(24 * PIECE)
    first, second = far.start(), far.start()
    fetcher = far.fetcher(*first.addresses, *second.addresses, silence_s=600)
    task = asyncio.create_task(fetcher.fetch(handle))
    await under_way(fetcher, task)
    first.signal(signal.SIGKILL)
    assert bytes(await asyncio.wait_for(task, 60)) == sent, "the end of a connection is seen, not waited for"
    assert set(fetcher._links) == {where(first), where(second)}


async def test_a_server_that_falls_silent_is_left_for_the_next(far: FarHost) -> None:
    handle, sent = far.put(24 * PIECE)
    first, second = far.start(), far.start()
    fetcher = far.fetcher(*first.addresses, *second.addresses, silence_s=QUIET_S)
    task = asyncio.create_task(fetcher.fetch(handle))
    await under_way(fetcher, task)
    first.signal(signal.SIGSTOP)
    assert bytes(await task) == sent
    assert set(fetcher._links) == {where(first), where(second)}


async def test_a_host_that_comes_back_in_time_is_waited_for(far: FarHost) -> None:
    handle, sent = far.put(24 * PIECE)
    server = far.start()
    fetcher = far.fetcher(*server.addresses, silence_s=QUIET_S)
    task = asyncio.create_task(fetcher.fetch(handle))
    await under_way(fetcher, task)
    server.signal(signal.SIGSTOP)
    (link,) = fetcher._links.values()
    while not link.closed:
        await asyncio.sleep(0.01)
    server.signal(signal.SIGCONT)
    assert bytes(await task) == sent


async def test_a_host_that_stays_away_is_named_with_what_was_tried(far: FarHost) -> None:
    handle, _ = far.put(PIECE)
    server = far.start()
    server.signal(signal.SIGSTOP)
    fetcher = far.fetcher(*server.addresses, patience_s=0.7, silence_s=QUIET_S)
    with pytest.raises(Unreachable) as caught:
        await fetcher.fetch(handle)
    assert caught.value.retryable
    assert far.name in str(caught.value)
    assert where(server) in str(caught.value)


async def test_servers_that_come_into_the_book_later_are_asked(far: FarHost) -> None:
    handle, sent = far.put(PIECE)
    fetcher = far.fetcher()
    task = asyncio.create_task(fetcher.fetch(handle))
    await asyncio.sleep(0)
    far.enter(fetcher, *far.serve())
    assert bytes(await task) == sent


async def test_a_server_that_leaves_the_book_is_left_at_once(far: FarHost) -> None:
    handle, sent = far.put(PIECE)
    silent = far.start()
    silent.signal(signal.SIGSTOP)
    fetcher = far.fetcher(*silent.addresses, silence_s=60)
    task = asyncio.create_task(fetcher.fetch(handle))
    await asyncio.sleep(0)
    far.enter(fetcher, *far.serve())
    assert bytes(await asyncio.wait_for(task, 60)) == sent


async def test_a_host_nobody_knows_is_unreachable_after_a_while(far: FarHost) -> None:
    handle, _ = far.put(PIECE)
    with pytest.raises(Unreachable, match=r"no data server of it is known"):
        await far.fetcher(patience_s=0.1).fetch(handle)


async def test_a_block_that_was_freed_or_used_again_is_bad_at_once(far: FarHost) -> None:
    handle, _ = far.put(PIECE)
    far.arena.free(handle.block)
    again, sent = far.put(PIECE)
    assert again.block.place == handle.block.place
    assert again.block.offset == handle.block.offset
    fetcher = far.fetcher(*far.serve(), patience_s=60)
    with pytest.raises(BadHandle, match="generation"):
        await fetcher.fetch(handle)
    assert bytes(await fetcher.fetch(again)) == sent


async def test_a_server_of_another_run_or_without_a_store_is_passed_over(far: FarHost) -> None:
    handle, sent = far.put(PIECE)
    place = far.store.put("request-1", memoryview(sent))
    stored = type(handle)("disk", type(handle.block)(place, 0, 0), handle.nbytes, handle.dtype, handle.shape)
    useless = far.serve(run=OTHER_RUN) + far.serve(store=False)
    assert bytes(await far.fetcher(*useless, *far.serve()).fetch(stored)) == sent
    with pytest.raises(Unreachable, match="another run"):
        await far.fetcher(*useless, patience_s=0.1).fetch(stored)
    far.store.discard("request-1")


async def test_a_server_that_reads_a_file_for_long_is_not_taken_for_silent(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, sent = far.put(100_000)
    place = far.store.put("request-1", memoryview(sent))
    stored = type(handle)("disk", type(handle.block)(place, 0, 0), handle.nbytes, handle.dtype, handle.shape)
    read, slow = DiskStore.read, threading.Event()

    def read_slowly(self: DiskStore, place: str, nbytes: int) -> bytes:
        slow.wait(20)
        return read(self, place, nbytes)

    monkeypatch.setattr(DiskStore, "read", read_slowly)
    monkeypatch.setattr("adapters.net.server._TICK_MS", 20)
    fetcher = far.fetcher(*far.serve(), silence_s=2)
    task = asyncio.create_task(fetcher.fetch(stored))
    while not fetcher._links:
        await asyncio.sleep(0)
    (link,) = fetcher._links.values()
    asyncio.get_running_loop().call_later(2.5, slow.set)
    assert bytes(await task) == sent
    assert not link.closed
    assert link._number == 1, "it was asked once"
    far.store.discard("request-1")


async def test_a_fetch_that_is_given_up_disturbs_no_other(far: FarHost) -> None:
    large, _ = far.put(16 * PIECE)
    handle, sent = far.put((WINDOW + 1) * PIECE)
    fetcher = far.fetcher(*far.serve())
    for _ in range(3):
        task = asyncio.create_task(fetcher.fetch(large))
        await under_way(fetcher, task)
        task.cancel()
        assert bytes(await fetcher.fetch(handle)) == sent
        assert task.cancelled()


@pytest.mark.parametrize("wrong", ["short", "long", "none", "disorder", "nonsense", "nested"])
async def test_a_server_that_answers_wrongly_is_left_for_the_next(far: FarHost, wrong: str) -> None:
    handle, sent = far.put(2 * PIECE)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        fetcher = far.fetcher(f"zmq://127.0.0.1:{port}", *far.serve(), silence_s=60)
        task = asyncio.create_task(fetcher.fetch(handle))
        peer, wants = b"", list[Want]()
        while len(wants) < 2:
            await asyncio.sleep(0)
            if router.poll(0):
                peer, question = router.recv_multipart()
                wants.append(decode_question(question))
        piece = encode(Piece(wants[1 if wrong == "disorder" else 0].number))
        answers = {
            "short": [piece, b"x"],
            "long": [piece, bytes(PIECE - 1), b"x"],
            "none": [piece],
            "disorder": [piece, bytes(PIECE)],
            "nonsense": [b"HTTP/1.1 400 Bad Request"],
            "nested": [bytes([piece[0] + 1]) + piece[1:] + b"\x91" * 60_000],
        }
        router.send_multipart([peer, *answers[wrong]])
        assert bytes(await asyncio.wait_for(task, 60)) == sent


async def test_a_transport_that_does_not_lead_there_is_an_error(far: FarHost) -> None:
    handle, _ = far.put(PIECE)
    with pytest.raises(AdapterError, match="shm"):
        await far.fetcher(*far.serve()).fetch(handle, "shm")
