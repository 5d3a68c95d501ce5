"""Peers of which the broker hears nothing, because they are gone or because it stood still itself."""

from __future__ import annotations

import pytest

from broker.protocol import Assign, Beat, Bye, Ended, Kill
from tests.core.driver import Driver, guard, line


@pytest.mark.parametrize("how", ["silent", "lost", "bye"])
def test_a_guardian_that_is_gone_takes_its_worker_with_it(how: str) -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    assert d.assigned(a)
    if how == "silent":
        for _ in range(8):
            d.tick(1.0)
            d.say(client, Beat())
    elif how == "lost":
        d.lose(guard(a))
    else:
        d.say(guard(a), Bye())
    assert not d.core.workers
    assert d.assigned(d.worker("b", "a"))[0].attempt == 2


def stood_still() -> tuple[Driver, bytes, bytes, Assign]:
    """A broker that did for longer than an attempt may take; a worker, a client, and their task under way."""
    d = Driver(line("a", retry={"timeout_s": 20, "attempts": 1}))
    a, client = d.worker("a", "a"), d.client()
    d.tick()
    d.submit(client)
    (task,) = d.assigned(a)
    d.tick(30.0)
    return d, a, client, task


def test_a_broker_that_stood_still_takes_nobody_for_dead() -> None:
    """Its process was stopped, or its machine was: beats wait to be read, or are sent only now."""
    d, a, client, task = stood_still()
    assert not d.take(guard(a), Kill)
    d.finish(a, task)
    for _ in range(6):
        d.tick()
    assert [ended.status for ended in d.take(client, Ended)] == ["done"]
    d.tick()
    assert not d.core.workers, "silence counts again"
    assert not d.core.clients


def test_a_machine_that_stood_still_for_longer_than_an_attempt_may_take_ends_no_attempt() -> None:
    d, a, client, task = stood_still()
    for _ in range(5):  # its engine goes on now, too
        d.say(guard(a), Beat([a]))
        d.say(client, Beat())
        d.tick()
    assert not d.take(guard(a), Kill)
    d.finish(a, task)
    assert [ended.status for ended in d.take(client, Ended)] == ["done"]


def test_a_client_that_was_given_up_and_lives_learns_that_its_requests_ended_early() -> None:
    d = Driver(line("a"))
    d.worker("a", "a")
    client = d.client()
    d.submit(client)
    for _ in range(8):
        d.tick()
    (ended,) = d.take(client, Ended)
    assert ended.error is not None
    assert (ended.status, ended.error.type) == ("cancelled", "client_lost")
