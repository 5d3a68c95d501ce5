"""Peers on other hosts than the broker's: who hears where memory is, and who removes what nobody needs."""

from __future__ import annotations

from adapters.handle import BlockId, Handle
from adapters.host import host_of
from broker.core.events import Gone
from broker.protocol import (
    VERSION,
    Beat,
    Bye,
    Connect,
    Emit,
    Hello,
    Hosts,
    Left,
    Ready,
    Release,
    Resync,
    Sweep,
    Unlink,
    Welcome,
)
from pipelines.graph import Pipeline
from tests.core.driver import RUN, Driver, chunk, guard, line
from tests.core.test_broker_restarts import restarted

HERE, THERE, YONDER = "0" * 12, "a" * 12, "b" * 12
AT_THERE, AT_YONDER = ["zmq://10.0.0.2:1"], ["zmq://10.0.0.3:1"]


def driver(*pipelines: Pipeline, **core: object) -> Driver:
    return Driver(*pipelines, host=HERE, **core)


def arena_at(host: str, worker: bytes) -> str:
    return f"omni-{RUN}-{host}{worker.hex():0<12}-"


def guardian(d: Driver, worker: bytes, stage: str, host: str, data: list[str]) -> None:
    d.say(guard(worker), Hello(VERSION, "", stage, "h", 1, "cpu", host, "", data))


def join(d: Driver, name: str, stage: str, host: str, data: list[str]) -> bytes:
    worker = b"w" + name.encode()
    guardian(d, worker, stage, host, data)
    d.say(worker, Ready(VERSION, guard(worker), 1, 2, arena_at(host, worker)))
    return worker


def block_of(worker: bytes, host: str, generation: int = 1) -> Handle:
    block = BlockId(f"{arena_at(host, worker)}0", 64, generation)
    return Handle("shm", block, 4, "float32", (1,))


def books(d: Driver, peer: bytes) -> list[dict[str, list[str]]]:
    return [message.book for message in d.take(peer, Hosts)]


def streaming() -> tuple[Driver, bytes, bytes]:
    """A chunk of a worker over there lies in its memory, and a worker here has been sent it."""
    d = driver(line("a", "b"))
    a, b = join(d, "1", "a", THERE, AT_THERE), join(d, "2", "b", HERE, [])
    d.submit(d.client(), name="name0000")
    (task,) = d.assigned(a)
    d.say(a, Emit(task.request, task.stage, task.attempt, chunk(0, handles=[block_of(a, THERE)])))
    assert d.assigned(b)
    return d, a, b


def test_on_one_host_nobody_hears_of_hosts() -> None:
    d = driver(line("a"))
    a, client = join(d, "1", "a", HERE, []), d.client()
    d.tick(20)
    for peer in (a, guard(a), client):
        assert not books(d, peer)
    assert not d.take(guard(a), Sweep)


def test_everybody_hears_where_memory_is_when_they_begin_and_when_it_changes() -> None:
    d = driver(line("a"))
    client = d.client()
    a = join(d, "1", "a", THERE, AT_THERE)
    assert books(d, client) == [{THERE: AT_THERE}]
    assert books(d, a) == [{THERE: AT_THERE}]
    assert books(d, d.client("2"))[-1] == {THERE: AT_THERE}
    join(d, "2", "a", YONDER, AT_YONDER)
    assert books(d, a) == books(d, client) == [{THERE: AT_THERE, YONDER: AT_YONDER}]
    d.lose(guard(b"w2"))
    assert books(d, a) == books(d, client) == [{THERE: AT_THERE}]


def test_the_report_shows_hosts_and_where_they_are_read() -> None:
    d = driver(line("a"))
    a = join(d, "1", "a", THERE, AT_THERE)
    report = d.core.hosts.report()
    assert report == {"here": HERE, "others": {THERE: ["line/a 1"]}, "book": {THERE: AT_THERE}}
    d.lose(guard(a))
    assert d.core.hosts.report() == {"here": HERE, "others": {}, "book": {}}


def test_a_client_serves_what_it_lends() -> None:
    d = driver(line("a"))
    a = join(d, "1", "a", HERE, [])
    client = d.client()
    d.say(client, Connect(VERSION, "api", arena_at(THERE, client), 0, THERE, "", AT_THERE))
    assert books(d, a) == [{THERE: AT_THERE}]
    d.say(client, Bye())
    assert books(d, a) == [{}]


def test_a_guardian_names_its_server_when_it_knows_the_run() -> None:
    d = driver(line("a"))
    guardian(d, b"w1", "a", THERE, [])
    assert d.take(b"g1", Welcome)[0].shm_host == HERE
    guardian(d, b"w1", "a", THERE, AT_THERE)
    assert books(d, b"g1") == [{THERE: AT_THERE}]


def test_a_dead_producers_memory_is_removed_by_a_guardian_of_its_host() -> None:
    d, a, b = streaming()
    other = b"w9"
    guardian(d, other, "a", THERE, [])
    d.lose(guard(a))
    assert not d.take(guard(other), Unlink), "a worker still looks at it"
    d.say(b, Release([block_of(a, THERE).block]))
    d.say(d.client(), Bye())
    arenas = [arena for message in d.take(guard(other), Unlink) for arena in message.arenas]
    assert arenas == [arena_at(THERE, a)]
    assert host_of(arenas[0]) == THERE


def test_a_host_that_comes_back_is_swept_of_what_nobody_needs() -> None:
    d, a, _ = streaming()
    d.lose(guard(a))  # the whole host has gone, with a chunk that is needed
    guardian(d, b"w8", "a", THERE, AT_THERE)
    for _ in range(12):
        d.say(b"g8", Beat([]))
        d.say(guard(b"w2"), Beat([b"w2"]))
        d.say(d.client(), Beat())
        d.tick()
    assert d.take(b"g8", Sweep)
    d.say(b"g8", Left([arena_at(THERE, a), arena_at(THERE, b"w7")], ["name0000", "name0001"]))
    (unlink,) = d.take(b"g8", Unlink)
    assert unlink.arenas == [arena_at(THERE, b"w7")], "of the other a chunk is still needed"
    assert unlink.names == ["name0001"]
    assert not d.take(guard(b"w2"), Sweep), "the broker's own host is swept by the broker"


def test_a_request_that_is_forgotten_leaves_no_files_on_any_host() -> None:
    d = driver(line("a"))
    a = join(d, "1", "a", THERE, AT_THERE)
    client = d.client()
    d.submit(client, name="name0000")
    (task,) = d.assigned(a)
    place = f"name0000/{THERE}{'1' * 20}"
    handle = Handle("disk", BlockId(place, 0, 0), 4, "float32", (1,))
    d.say(a, Emit(task.request, task.stage, task.attempt, chunk(0, last=True, handles=[handle])))
    d.say(client, Bye())
    assert [message.names for message in d.take(guard(a), Unlink)] == [["name0000"]]


def test_a_restarted_broker_knows_who_serves_and_asks_them_to_sweep_when_they_have_spoken() -> None:
    before = driver(line("a"), journal=True)
    a = join(before, "1", "a", THERE, AT_THERE)
    d = restarted(before)
    assert d.core.hosts.book == {THERE: AT_THERE}
    d.say(guard(a), Beat([a]))
    d.say(a, Ready(VERSION, guard(a), 1, 2, arena_at(THERE, a)))
    assert not books(d, a), "nothing is sent before an introduction is whole"
    d.say(a, Resync([], [], d.core.boot))
    assert books(d, a) == [{THERE: AT_THERE}]
    assert d.take(guard(a), Sweep)


def test_a_guardian_that_died_with_the_broker_is_out_of_the_book() -> None:
    before = driver(line("a"), journal=True)
    a = join(before, "1", "a", THERE, AT_THERE)
    client = before.client()
    d = restarted(before)
    d.say(client, Connect(VERSION, "api", met=1))
    d.say(client, Resync([], [], d.core.boot))
    d.event(Gone(d.now, guard(a)))
    assert books(d, client)[-1] == {}
