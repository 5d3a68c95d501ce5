"""What a dead worker had put into the store, and never told of, goes with its request."""

from __future__ import annotations

import msgspec
import pytest

from broker.protocol import Forget
from pipelines.graph import Edge, Pipeline
from tests.core.driver import Driver, chunk, line

NAME = "name0000"


def with_edge(**settings: str) -> Pipeline:
    """`a`, then `b`, with these settings between them."""
    pipeline = line("a", "b")
    edge = msgspec.convert({"from": "a", "to": "b", **settings}, Edge)
    return msgspec.structs.replace(pipeline, edges=[pipeline.edges[0], edge])


@pytest.mark.parametrize(
    ("settings", "discards"),
    [
        ({"checkpoint": "disk"}, [NAME]),
        ({"transport": "mooncake"}, [NAME]),
        ({"transport": "zmq"}, []),
        ({}, []),
    ],
)
def test_what_a_dead_worker_put_is_discarded_where_it_may_have(
    settings: dict[str, str], discards: list[str]
) -> None:
    d = Driver(with_edge(**settings))
    client = d.client()
    first, second, last = d.worker("1", "a"), d.worker("2", "a"), d.worker("3", "b")
    d.submit(client, name=NAME)
    workers = {worker: d.assigned(worker) for worker in (first, second)}
    (busy,) = [worker for worker, tasks in workers.items() if tasks]
    d.die(busy)
    (other,) = {first, second} - {busy}
    (task,) = d.assigned(other)
    d.emit(other, task, chunk(0, last=True))
    (task,) = d.assigned(last)
    assert d.discarded == []
    d.emit(last, task, chunk(0, last=True))
    d.say(client, Forget(1))
    assert d.discarded == discards
