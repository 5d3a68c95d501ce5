"""What a core makes of its predecessor's journal."""

from __future__ import annotations

from broker.core.records import OfPeer, OfRequest
from broker.core.restore import restore
from broker.protocol import Beat, Kill
from tests.core.driver import Driver, guard, line


def restarted(d: Driver) -> Driver:
    """The broker dies; its successor has the journal."""
    batch = d.core.take_records()
    peers: dict[bytes, OfPeer] = {peer: met for peer, met in batch.peers.items() if met is not None}
    records: list[tuple[int, OfRequest]] = [
        (number, record) for number, records in batch.requests.items() for record in records
    ]
    specs = [pipeline.spec for pipeline in d.core.board.pipelines.values()]
    successor = Driver(*specs, journal=True, boot=d.core.boot + 1)
    successor.now = d.now
    restore(successor.core, peers, records, d.now)
    return successor


def until_killed(d: Driver, worker: bytes) -> float:
    """Seconds until the guardian, which beats all the time, is told to kill its engine."""
    began = d.now
    while not d.take(guard(worker), Kill):
        d.say(guard(worker), Beat([worker]))
        d.tick()
        assert d.now < began + 100
    return d.now - began


def hung(limit_s: float, for_s: float) -> tuple[Driver, bytes]:
    """An engine that has said nothing for so long since it got its task."""
    d = Driver(line("a", retry={"timeout_s": limit_s}), journal=True)
    worker, client = d.worker("1", "a"), d.client()
    d.submit(client, name="name0000", stored=True)
    assert d.assigned(worker)
    d.now += for_s
    return d, worker


def test_a_hung_engine_gets_no_new_time_by_the_brokers_death() -> None:
    d, worker = hung(20, 12)
    assert until_killed(restarted(d), worker) <= 20 - 12 + 2


def test_an_engine_whose_time_ran_out_while_the_broker_was_away_may_introduce_itself_first() -> None:
    d, worker = hung(20, 60)
    assert 5 <= until_killed(restarted(d), worker) <= 8
