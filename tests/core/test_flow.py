"""How requests flow through the core when nothing goes wrong, and in which order."""

from __future__ import annotations

import msgspec

from broker.protocol import Abort, Accepted, Cancel, Ended, Input, Output, Refused
from pipelines.graph import Pipeline
from tests.core.driver import Driver, chunk, line


def test_a_request_passes_all_stages_in_order_and_leaves_nothing() -> None:
    d = Driver(line("a", "b"))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    assert task.attempt == 1
    assert not d.assigned(b)
    d.emit(a, task, chunk(0, last=True, body="from a"))
    (task,) = d.assigned(b)
    assert bytes(task.inputs[0].chunks[0].body) == msgspec.msgpack.encode("from a")
    assert task.inputs[0].closed
    d.emit(b, task, chunk(0, last=True, body="from b"))
    assert [m.tag for m in d.take(client, Accepted)] == [1]
    assert [bytes(m.chunk.body) for m in d.take(client, Output)] == [msgspec.msgpack.encode("from b")]
    (ended,) = d.take(client, Ended)
    assert ended.status == "done"
    assert [t.stage for t in ended.timings] == ["a", "b"]
    d.assert_empty()


def test_a_streaming_consumer_starts_with_the_first_chunk_and_gets_the_rest_as_input() -> None:
    d = Driver(line("a", "b"))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client)
    (first,) = d.assigned(a)
    d.emit(a, first, chunk(0))
    (second,) = d.assigned(b)
    assert [c.seq for c in second.inputs[0].chunks] == [0]
    assert not second.inputs[0].closed
    d.emit(a, first, chunk(1))
    d.finish(a, first)
    inputs = d.take(b, Input)
    assert [[c.seq for c in m.input.chunks] for m in inputs] == [[1], []]
    assert [m.input.closed for m in inputs] == [False, True]
    d.finish(b, second)
    assert d.take(client, Ended)[0].status == "done"
    d.assert_empty()


def test_a_consumer_that_wants_all_waits_for_the_end() -> None:
    pipeline = line("a", "b")
    edges = [pipeline.edges[0], msgspec.structs.replace(pipeline.edges[1], stream=False)]
    d = Driver(msgspec.structs.replace(pipeline, edges=edges))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0))
    assert not d.assigned(b)
    d.finish(a, task)
    (task,) = d.assigned(b)
    assert [c.seq for c in task.inputs[0].chunks] == [0]


def test_stages_that_no_wanted_output_needs_never_run() -> None:
    d = Driver(line("a", "b", outputs={"early": "a"}))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client, outputs=("early",))
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0, last=True))
    assert not d.assigned(b)
    assert d.take(client, Ended)[0].status == "done"


def test_a_caller_may_stand_in_for_a_stage() -> None:
    d = Driver(line("a", "b"))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client, given={"a": [chunk(0, last=True, body="given")]})
    assert not d.assigned(a)
    (task,) = d.assigned(b)
    assert bytes(task.inputs[0].chunks[0].body) == msgspec.msgpack.encode("given")


def test_a_stage_with_when_runs_only_for_its_modality() -> None:
    document = {
        "name": "p",
        "outputs": {"out": "think"},
        "stages": {"hear": {"engine": "f", "when": "audio"}, "think": {"engine": "f"}},
        "edges": [
            {"from": "request", "to": "hear"},
            {"from": "request", "to": "think"},
            {"from": "hear", "to": "think", "stream": False},
        ],
    }
    d = Driver(msgspec.convert(document, Pipeline))
    hear, think, client = d.worker("h", "hear"), d.worker("t", "think", capacity=4), d.client()
    d.submit(client, 1)
    assert not d.assigned(hear)
    assert len(d.assigned(think)) == 1
    d.submit(client, 2, has=["audio"])
    assert not d.assigned(think)
    (task,) = d.assigned(hear)
    d.emit(hear, task, chunk(0, last=True))
    assert [i.edge for i in d.assigned(think)[0].inputs] == [1, 2]


def test_a_stage_with_several_modalities_runs_once_for_any_of_them() -> None:
    document = {
        "name": "p",
        "outputs": {"out": "think"},
        "stages": {"see": {"engine": "f", "when": ["audio", "image"]}, "think": {"engine": "f"}},
        "edges": [{"from": "request", "to": "see"}, {"from": "see", "to": "think"}],
        "inputs": ["video"],
    }
    pipeline = msgspec.convert(document, Pipeline)
    assert pipeline.takes() == ["audio", "image", "video"]
    for has, runs in ([], False), (["image"], True), (["audio", "image"], True), (["video"], False):
        assert (pipeline.needed(["out"], set(), set(has)) == ["see", "think"]) is runs
    d = Driver(pipeline)
    see, client = d.worker("s", "see", capacity=4), d.client()
    for tag, has in enumerate((["audio", "image"], ["image", "audio"], ["video"])):
        d.submit(client, tag, has=has)
    assert len(d.assigned(see)) == 2


def test_work_goes_only_against_credit_and_in_turn() -> None:
    d = Driver(line("a"))
    client = d.client()
    for tag in range(6):
        d.submit(client, tag)
    one, two = d.worker("1", "a", capacity=2), d.worker("2", "a", capacity=2)
    held = d.assigned(two)
    assert len(d.assigned(one)) == len(held) == 2
    d.submit(client, 9)
    assert not d.assigned(one)
    assert not d.assigned(two)
    d.finish(two, held[0])
    assert len(d.assigned(two)) == 1
    assert not d.assigned(one)


def test_priority_then_deadline_then_fair_share_then_arrival() -> None:
    d = Driver(line("a"))
    client = d.client()
    for tag, more in enumerate([{}, {"deadline_s": 9.0}, {"deadline_s": 5.0}, {"priority": -1}]):
        d.submit(client, tag, **more)
    for tag in (10, 11, 12):
        d.submit(client, tag, tenant="flood")
    d.submit(client, 13, tenant="small")
    worker = d.worker("a", "a", capacity=8)
    numbers = {m.request: m.tag for m in d.take(client, Accepted)}
    order = [numbers[m.request] for m in d.assigned(worker)]
    assert order[:3] == [3, 2, 1]
    assert order.index(13) < order.index(11) < order.index(12)


def test_cancel_while_queued_leaves_nothing_for_the_worker() -> None:
    d = Driver(line("a"))
    client = d.client()
    d.submit(client, 1)
    d.submit(client, 2)
    d.say(client, Abort(1))
    assert d.take(client, Ended)[0].status == "cancelled"
    worker = d.worker("a", "a", capacity=4)
    assert len(d.assigned(worker)) == 1


def test_cancel_while_running_stops_the_worker_and_late_chunks_change_nothing() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client, 1)
    (task,) = d.assigned(a)
    d.say(client, Abort(1))
    assert [(m.request, m.attempt) for m in d.take(a, Cancel)] == [(task.request, 1)]
    d.emit(a, task, chunk(0))
    d.fail(a, task, "cancelled")
    assert not d.take(client, Output)
    d.assert_empty()


def test_a_deadline_ends_the_request() -> None:
    d = Driver(line("a"))
    client = d.client()
    d.submit(client, deadline_s=2.0)
    d.tick(1.0)
    assert not d.take(client, Ended)
    d.tick(1.5)
    assert d.take(client, Ended)[0].error.status == 504  # type: ignore[union-attr]
    d.assert_empty()


def test_a_full_pipeline_refuses_with_retry_after() -> None:
    pipeline = msgspec.structs.replace(
        line("a"), limits=msgspec.convert({"max_requests": 1}, type(line("a").limits))
    )
    d = Driver(pipeline)
    client = d.client()
    d.submit(client, 1)
    d.submit(client, 2)
    (refused,) = d.take(client, Refused)
    assert (refused.tag, refused.error.status) == (2, 429)
    assert refused.error.retry_after_s
    d.say(client, Abort(1))
    d.submit(client, 3)
    assert [m.tag for m in d.take(client, Accepted)] == [1, 3]


def test_what_the_graph_cannot_give_is_refused_and_named() -> None:
    d = Driver(line("a", "b"))
    client = d.client()
    d.submit(client, 1, outputs=("video",))
    d.submit(client, 2, outputs=("out", "out"))
    d.submit(client, 3, outputs=())
    d.submit(client, 4, given={"nobody": []})
    d.submit(client, 5, given={"b": []})
    d.submit(client, 6, params={"nobody": msgspec.Raw(b"\x80")})
    d.submit(client, 7, pipeline="other")
    refused = {m.tag: m.error for m in d.take(client, Refused)}
    assert {tag: e.param for tag, e in refused.items()} == {
        1: "outputs", 2: "outputs", 3: "outputs", 4: "given", 5: "outputs", 6: "params", 7: "model",
    }  # fmt: skip
    assert "out" in refused[1].message
    d.assert_empty()


def test_a_seed_is_drawn_once_and_given_ones_are_kept() -> None:
    d = Driver(line("a", "b"))
    a, b, client = d.worker("a", "a", capacity=9), d.worker("b", "b"), d.client()
    d.submit(client, 1, seed=7)
    d.submit(client, 2)
    d.submit(client, 3)
    one, two, three = d.assigned(a)
    assert one.seed == 7
    assert two.seed != three.seed
    d.emit(a, two, chunk(0, last=True))
    assert d.assigned(b)[0].seed == two.seed
