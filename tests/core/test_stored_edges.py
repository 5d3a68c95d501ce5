"""What a worker had put into the store, and never told of, goes with its request."""

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
def test_what_a_worker_may_have_put_is_discarded(settings: dict[str, str], discards: list[str]) -> None:
    d = Driver(with_edge(**settings))
    client, first, last = d.client(), d.worker("1", "a"), d.worker("2", "b")
    d.submit(client, name=NAME)
    for worker in (first, last):
        (task,) = d.assigned(worker)
        d.emit(worker, task, chunk(0, last=True))
    assert d.discarded == []
    d.say(client, Forget(1))
    assert d.discarded == discards
