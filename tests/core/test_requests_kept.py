"""Who may come in, and how long requests are kept."""

from __future__ import annotations

from typing import Any

import msgspec

from broker.core.machine import Settings
from broker.core.requests import Settings as RequestSettings
from broker.protocol import (
    VERSION,
    Abort,
    Accepted,
    Assign,
    Attach,
    Attached,
    Busy,
    Bye,
    Cancel,
    Checkpoint,
    Connect,
    Connected,
    Ended,
    Error,
    Forget,
    Inspect,
    Letters,
    Output,
    Refused,
    Release,
    Report,
)
from pipelines.graph import Pipeline
from tests.core.driver import Driver, arena, chunk, handle, line

NAME = "name0000"


def gateway(d: Driver, name: str = "g") -> bytes:
    peer = b"c" + name.encode()
    d.say(peer, Connect(VERSION, "gateway", arena(peer)))
    assert d.take(peer, Connected)
    return peer


def narrow() -> Pipeline:
    """Takes two requests."""
    limits = msgspec.structs.replace(line("a").limits, max_requests=2)
    return msgspec.structs.replace(line("a"), limits=limits)


def letters(d: Driver, act: str, name: str = "") -> dict[str, object]:
    client = d.client("letters")
    d.say(client, Letters(1, act, name))  # type: ignore[arg-type]
    body: dict[str, object] = msgspec.msgpack.decode(d.take(client, Report)[-1].body)
    return body


def fail_for_good(d: Driver, worker: bytes, client: bytes, tag: int, name: str) -> None:
    d.submit(client, tag, name=name)
    (task,) = d.assigned(worker)
    d.fail(worker, task, error=Error("stage_failed", "it broke"))


def test_a_deadline_that_can_not_be_met_is_refused_at_once() -> None:
    d = Driver(line("a"))
    worker, client = d.worker("1", "a"), d.client()
    for tag in range(20):
        d.submit(client, tag)
        (task,) = d.assigned(worker)
        d.now += 2.0
        d.emit(worker, task, chunk(0, last=True))
    d.submit(client, 100, deadline_s=1.0)
    (refused,) = d.take(client, Refused)
    assert (refused.error.type, refused.error.status) == ("overloaded", 503)
    assert refused.error.retry_after_s is not None
    d.submit(client, 101, deadline_s=10.0)
    assert [m.tag for m in d.take(client, Accepted)][-1] == 101


def test_a_slow_start_does_not_refuse_deadlines_for_ever() -> None:
    """What is refused because of it would never show that the stage is fast by now."""
    d = Driver(line("a"))
    worker, client = d.worker("1", "a"), d.client()
    d.submit(client, 1)
    (task,) = d.assigned(worker)
    d.now += 40.0  # the model warmed up
    d.emit(worker, task, chunk(0, last=True))
    d.submit(client, 2, deadline_s=30.0)
    assert d.take(client, Refused)
    d.now += 90.0
    d.submit(client, 3, deadline_s=30.0)
    (task,) = d.assigned(worker)
    d.now += 1.0
    d.emit(worker, task, chunk(0, last=True))
    d.submit(client, 4, deadline_s=30.0)
    assert not d.take(client, Refused)


def test_gateways_hear_when_a_pipeline_is_full_and_when_it_is_not() -> None:
    d = Driver(narrow())
    worker, client = d.worker("1", "a", capacity=2), gateway(d)
    d.submit(client, 1)
    assert not d.take(client, Busy)
    d.submit(client, 2)
    (busy,) = d.take(client, Busy)
    assert busy.retry_after_s >= 1
    late = gateway(d, "late")
    assert [m.pipeline for m in d.take(late, Busy)] == ["line"]
    for task in d.assigned(worker):
        d.emit(worker, task, chunk(0, last=True))
    assert [m.retry_after_s for m in d.take(client, Busy)] == [0.0]


def test_a_dead_gateways_requests_go_on_for_those_who_come_back() -> None:
    d = Driver(line("a"))
    worker, old = d.worker("1", "a"), gateway(d, "old")
    d.submit(old, 1, name=NAME)
    (task,) = d.assigned(worker)
    d.emit(worker, task, chunk(0, handles=[handle(worker, 64)]))
    d.lose(old)
    assert not d.take(worker, Cancel)
    new = gateway(d, "new")
    d.emit(worker, task, chunk(1))
    d.say(new, Attach(7, NAME, {"out": 0}))
    assert d.take(new, Attached)
    assert [m.chunk.seq for m in d.take(new, Output)] == [0, 1]
    d.emit(worker, task, chunk(2, last=True))
    assert [m.chunk.seq for m in d.take(new, Output)] == [2]
    assert [m.status for m in d.take(new, Ended)] == ["done"]
    d.say(new, Forget(7))
    d.say(new, Attach(8, NAME))
    assert [m.error.status for m in d.take(new, Refused)] == [404]


def test_a_request_that_its_client_takes_for_over_goes_on_for_those_who_come_back() -> None:
    """The broker before this one had told it so (another had taken over), and its word came late."""
    d = Driver(line("a"), settings=Settings(requests=RequestSettings(detached_s=5.0)))
    worker, client = d.worker("1", "a"), gateway(d)
    d.submit(client, 1, name=NAME)
    (task,) = d.assigned(worker)
    d.say(client, Forget(1))
    d.emit(worker, task, chunk(0, last=True))
    assert not d.take(client, Output)
    other = gateway(d, "other")
    d.say(other, Attach(1, NAME))
    assert [m.chunk.seq for m in d.take(other, Output)] == [0]
    d.say(other, Forget(1))
    d.say(other, Attach(2, NAME))
    assert [m.error.status for m in d.take(other, Refused)] == [404]


def test_nobody_coming_back_ends_it_after_a_while() -> None:
    d = Driver(line("a"), settings=Settings(requests=RequestSettings(detached_s=5.0)))
    worker, client = d.worker("1", "a"), gateway(d)
    d.submit(client, 1, name=NAME)
    d.lose(client)
    for _ in range(5):
        d.tick()
    assert not d.take(worker, Cancel)
    d.tick(0.9)
    d.tick(0.9)
    assert d.take(worker, Cancel)


def test_a_caller_that_leaves_cancels_but_not_what_is_stored() -> None:
    d = Driver(line("a"))
    worker, client = d.worker("1", "a", capacity=2), gateway(d)
    d.submit(client, 1, name="plain000")
    d.submit(client, 2, name="stored00", stored=True)
    plain, stored = d.assigned(worker)
    d.say(client, Abort(1))
    d.say(client, Abort(2, leave=True))
    assert [m.request for m in d.take(worker, Cancel)] == [plain.request]
    d.emit(worker, stored, chunk(0, last=True))
    other = gateway(d, "other")
    d.say(other, Attach(1, "stored00"))
    assert [m.chunk.seq for m in d.take(other, Output)] == [0]
    assert d.take(other, Ended)


def test_what_is_stored_is_kept_as_long_as_it_says() -> None:
    d = Driver(line("a"), settings=Settings(requests=RequestSettings(keep_s=10)))
    client, worker = gateway(d), d.worker("a", "a", capacity=2)
    d.submit(client, 1, name="usual000", stored=True)
    d.submit(client, 2, name="longer00", stored=True, keep_s=20.0)
    for task in d.assigned(worker):
        d.emit(worker, task, chunk(0, last=True))
        d.finish(worker, task)
    for tag in (1, 2):
        d.say(client, Abort(tag, leave=True))
    kept = {}
    for seconds in (9, 2, 8, 2):
        d.tick(seconds)
        kept[d.now] = [report["name"] for report in stored(d, "")]
    assert list(kept.values()) == [["usual000", "longer00"], ["longer00"], ["longer00"], []]


def test_the_stored_requests_of_a_tenant_are_listed_with_their_progress() -> None:
    d = Driver(line("a", "b"))
    client, worker = gateway(d), d.worker("a", "a")
    d.submit(client, 1, name="mine0000", stored=True, tenant="me")
    d.submit(client, 2, name="passing0", tenant="me")
    d.submit(client, 3, name="another0", stored=True, tenant="you")
    (task,) = d.assigned(worker)

    def progress() -> dict[str, float]:
        (report,) = stored(d, "me")
        assert report["name"] == "mine0000"
        found: dict[str, float] = report["progress"]
        return found

    assert progress() == {"a": 0.0, "b": 0.0}
    for body, shown in (({"step": 1}, 0.0), ({"progress": 0.25}, 0.25), ({"progress": 7}, 1.0), ([1], 0.0)):
        d.say(worker, Checkpoint(task.request, task.stage, 1, chunk(0, body=body)))
        assert progress() == {"a": shown, "b": 0.0}
    d.emit(worker, task, chunk(0, last=True))
    d.finish(worker, task)
    assert progress() == {"a": 1.0, "b": 0.0}


def stored(d: Driver, tenant: str) -> list[dict[str, Any]]:
    client = d.client("looks")
    d.say(client, Inspect(1, "stored", tenant))
    body: dict[str, list[dict[str, Any]]] = msgspec.msgpack.decode(d.take(client, Report)[-1].body)
    return body["requests"]


def test_a_program_that_leaves_cancels_its_requests() -> None:
    d = Driver(line("a"))
    worker, client = d.worker("1", "a"), d.client()
    d.submit(client, 1, name=NAME)
    d.say(client, Bye())
    assert d.take(worker, Cancel)


def test_what_failed_for_good_is_kept_with_its_inputs_and_runs_again_when_told() -> None:
    d = Driver(line("a", retry={"attempts": 1}))
    worker, client = d.worker("1", "a"), d.client()
    fail_for_good(d, worker, client, 1, NAME)
    assert [m.status for m in d.take(client, Ended)] == ["failed"]
    d.say(client, Forget(1))
    (letter,) = letters(d, "list")["letters"]  # type: ignore[misc]
    assert (letter["name"], letter["stage"], letter["attempts"]) == (NAME, "a", 1)
    assert "it broke" in str(letter["error"])
    assert letters(d, "show", NAME)["letter"]["outputs"] == ["out"]  # type: ignore[index]
    assert letters(d, "retry", NAME) == {"name": NAME}
    assert letters(d, "list") == {"letters": []}
    (again,) = d.take(worker, Assign)
    assert again.inputs[0].chunks
    assert letters(d, "drop", "nothing0") == {"dropped": 0}
    assert letters(d, "retry", "nothing0") == {"error": "no dead letter 'nothing0'"}


def test_the_oldest_dead_letters_go_when_there_are_too_many() -> None:
    d = Driver(line("a", retry={"attempts": 1}), settings=Settings(requests=RequestSettings(letters=3)))
    worker, client = d.worker("1", "a"), d.client()
    for tag in range(5):
        fail_for_good(d, worker, client, tag, f"letter{tag:02}")
    kept = [letter["name"] for letter in letters(d, "list")["letters"]]  # type: ignore[attr-defined]
    assert kept == ["letter02", "letter03", "letter04"]


def test_the_caller_of_a_request_that_is_too_large_for_the_dead_letters_hears_of_its_end() -> None:
    d = Driver(line("a", retry={"attempts": 1}), settings=Settings(requests=RequestSettings(block_bytes=16)))
    worker, client = d.worker("1", "a"), d.client()
    d.submit(client, name=NAME, given={"request": [chunk(0, last=True, handles=[handle(client, 0)])]})
    (task,) = d.assigned(worker)
    d.fail(worker, task, error=Error("stage_failed", "it broke"))
    (ended,) = d.take(client, Ended)
    assert ended.error is not None
    assert ended.error.message == "it broke"
    d.say(client, Forget(1))
    d.say(worker, Release([handle(client, 0).block]))
    d.assert_empty()
