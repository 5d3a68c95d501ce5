"""What the core does when workers, items and clients fail."""

from __future__ import annotations

import pytest

from broker.protocol import (
    VERSION,
    Abort,
    Beat,
    Bye,
    Cancel,
    Checkpoint,
    Connect,
    Connected,
    Died,
    Drain,
    Emit,
    Ended,
    Error,
    Failed,
    Finish,
    Free,
    Hello,
    Input,
    Inspect,
    Kill,
    Message,
    Output,
    Ready,
    Refused,
    Reject,
    Release,
    Submit,
    Who,
)
from tests.core.driver import RUN, Driver, arena, chunk, guard, handle, line


def test_a_dead_workers_task_runs_again_and_no_chunk_is_repeated_or_missing() -> None:
    d = Driver(line("a"))
    a, client = d.worker("1", "a"), d.client()
    d.submit(client)
    (first,) = d.assigned(a)
    d.emit(a, first, chunk(0))
    d.emit(a, first, chunk(1))
    d.die(a)
    second = d.worker("2", "a")
    (again,) = d.assigned(second)
    assert (again.attempt, again.seed) == (2, first.seed)
    assert again.resume is not None
    assert again.resume.emitted == 2
    d.emit(second, again, chunk(1))  # repeats one
    d.emit(second, again, chunk(2, last=True))
    assert [m.chunk.seq for m in d.take(client, Output)] == [0, 1, 2]
    assert d.take(client, Ended)[0].timings[0].attempts == 2
    d.assert_empty()


def test_an_engine_that_resumes_gets_the_bodies_and_its_last_checkpoint() -> None:
    d = Driver(line("a"))
    a, client = d.worker("1", "a", resumes=True), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0, body="x"))
    d.say(a, Checkpoint(task.request, task.stage, 1, chunk(1, body="old", handles=[handle(a, 64)])))
    d.say(a, Checkpoint(task.request, task.stage, 1, chunk(1, body="new", handles=[handle(a, 128)])))
    assert [b.offset for m in d.take(a, Free) for b in m.blocks] == [64]
    d.die(a)
    b = d.worker("2", "a", resumes=True)
    (again,) = d.assigned(b)
    assert again.resume is not None
    assert [bytes(body) for body in again.resume.bodies] == [b"\xa1x"]
    assert again.resume.checkpoint is not None
    assert bytes(again.resume.checkpoint.body) == b"\xa3new"
    d.finish(b, again)
    d.say(b, Release([handle(a, 128).block]))
    assert arena(a) in d.reaped
    d.assert_empty()


def test_a_consumer_that_runs_again_gets_all_its_inputs_again() -> None:
    d = Driver(line("a", "b"))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0, handles=[handle(a, 0)]))
    (consumer,) = d.assigned(b)
    d.emit(a, task, chunk(1))
    assert len(d.take(b, Input)) == 1
    d.die(b)
    other = d.worker("b2", "b")
    (again,) = d.assigned(other)
    assert [c.seq for c in again.inputs[0].chunks] == [0, 1]
    assert not d.take(a, Free)
    d.emit(a, task, chunk(2, last=True))
    assert len(d.take(other, Input)) == 1
    d.finish(other, again)
    assert not d.take(a, Free), "the consumer still looks at it"
    d.say(other, Release([handle(a, 0).block]))
    assert len(d.take(a, Free)) == 1
    assert consumer.attempt == 1
    d.assert_empty()


def test_what_a_poisonous_item_ran_with_succeeds_and_it_fails_alone() -> None:
    d = Driver(line("a"))
    client = d.client()
    worker = d.worker("0", "a", capacity=4)
    for tag in range(4):
        d.submit(client, tag)
    poison = d.assigned(worker)[2].request
    for life in range(1, 20):
        d.die(worker)
        worker = d.worker(str(life), "a", capacity=4)
        while tasks := d.assigned(worker):
            assert len(tasks) == 1, "after a death tasks run alone"
            if tasks[0].request == poison:
                break
            d.emit(worker, tasks[0], chunk(0, last=True))
        else:
            break
    ended = {m.tag: m for m in d.take(client, Ended)}
    assert {tag: m.status for tag, m in ended.items()} == {0: "done", 1: "done", 2: "failed", 3: "done"}
    error = ended[2].error
    assert error is not None
    assert (error.type, error.stage, error.attempts) == ("worker_died", "a", 4)  # the first blames nobody
    assert "SIGKILL" in error.message
    d.submit(client, 9)
    d.submit(client, 10)
    assert len(d.assigned(worker)) == 2, "and the worker takes several at once again"


def test_an_item_that_raises_is_tried_as_often_as_the_stage_says() -> None:
    d = Driver(line("a", retry={"attempts": 2}))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    for attempt in (1, 2):
        (task,) = d.assigned(a)
        assert task.attempt == attempt
        d.fail(a, task, error=Error("stage_failed", "boom"))
    error = d.take(client, Ended)[0].error
    assert error is not None
    assert (error.message, error.stage, error.attempts) == ("boom", "a", 2)
    d.assert_empty()


def test_the_callers_own_fault_is_not_tried_again() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    d.fail(a, d.assigned(a)[0], error=Error("invalid_request_error", "too long", 400))
    assert not d.assigned(a)
    assert d.take(client, Ended)[0].error.status == 400  # type: ignore[union-attr]


def test_a_worker_that_drains_finishes_takes_nothing_new_and_is_not_blamed() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a", capacity=2), d.client()
    d.submit(client, 1)
    d.submit(client, 2)
    one, two = d.assigned(a)
    d.say(a, Bye())
    assert len(d.take(a, Drain)) == 1
    d.submit(client, 3)
    d.emit(a, one, chunk(0, last=True))
    assert not d.assigned(a)
    d.fail(a, two, "drained")
    d.die(a, "exit code 0")
    b = d.worker("b", "a", capacity=4)
    assert sorted(t.attempt for t in d.assigned(b)) == [1, 2]
    assert len(d.core.workers) == 1


def test_a_hung_attempt_is_killed_at_its_time_limit_and_only_it_is_blamed() -> None:
    d = Driver(line("a", retry={"timeout_s": 5, "attempts": 1}))
    a, client = d.worker("a", "a", capacity=2), d.client()
    d.submit(client, 1)
    for _ in range(3):
        d.tick()
    d.submit(client, 2)
    d.say(guard(a), Beat())
    d.say(client, Beat())
    for _ in range(3):
        d.tick()
    (kill,) = d.take(guard(a), Kill)
    assert kill.worker == a
    d.tick(0.5)
    assert not d.take(guard(a), Kill), "it is told once"
    d.die(a, kill.cause)
    ended = d.take(client, Ended)
    assert [(m.tag, m.status) for m in ended] == [(1, "failed")]
    assert ended[0].error.status == 504  # type: ignore[union-attr]
    (task,) = d.assigned(d.worker("b", "a", capacity=2))
    assert task.attempt == 2


def test_a_worker_that_ignores_a_cancel_is_killed() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    d.lose(client)
    assert d.take(a, Cancel)
    for _ in range(12):
        d.tick(1.0)
        d.say(guard(a), Beat())
    assert d.take(guard(a), Kill)
    d.say(guard(a), Beat([a]))
    assert d.take(guard(a), Kill), "a guardian that was not there when it was told is told again"
    d.die(a)
    d.say(guard(a), Beat())
    assert not d.take(guard(a), Kill)


@pytest.mark.parametrize("proved", [False, True])
def test_who_ran_beside_a_job_that_ignores_a_cancel_is_not_blamed_for_it(*, proved: bool) -> None:
    d = Driver(line("a", retry={"attempts": 1}))
    a, client = d.worker("a", "a", capacity=2), d.client()
    d.submit(client, 1)
    d.submit(client, 2)
    left, innocent = d.assigned(a)
    if proved:
        d.emit(a, left, chunk(0))
    d.say(client, Abort(1))
    for _ in range(12):
        d.say(client, Beat())
        d.say(guard(a), Beat([a]))
        d.tick(1.0)
    assert d.take(guard(a), Kill)
    d.die(a, "killed: it did not stop a cancelled task")
    assert [m.tag for m in d.take(client, Ended)] == [1]
    b = d.worker("b", "a")
    (again,) = d.assigned(b)
    assert (again.request, again.attempt) == (innocent.request, 2)
    d.die(b)
    assert [m.status for m in d.take(client, Ended)] == ["failed"], "now it was alone"


def test_tasks_of_a_worker_whose_connection_broke_are_not_blamed_for_it() -> None:
    d = Driver(line("a", retry={"attempts": 1}))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    assert d.assigned(a)
    d.lose(a)
    assert d.take(guard(a), Kill)
    d.die(a, "killed: its connection to the broker broke")
    assert not d.take(client, Ended)
    assert d.assigned(d.worker("b", "a"))


def test_what_a_client_wrote_after_it_was_given_up_is_swept() -> None:
    """It learns late that it was; until then it may have put tensors into the disk store."""
    d = Driver(line("a"))
    client = d.client()
    d.lose(client)
    d.tick(11.0)
    assert d.sweeps == 1
    d.say(client, Connect(VERSION, "gateway", arena(client)))
    for _ in range(30):
        d.say(client, Beat())
        d.tick()
    assert d.sweeps == 2, "once, when it had begun anew"


def test_what_is_left_by_one_that_lived_on_after_it_was_given_up_is_swept_some_time() -> None:
    """Nobody hears of its death, so there is a look now and then."""
    d = Driver(line("a"))
    d.lose(d.client())
    for _ in range(71):
        d.tick()
    assert d.sweeps == 2


def test_nobody_looks_for_leftovers_where_nobody_was_ever_given_up() -> None:
    d = Driver(line("a"))
    d.worker("1", "a")
    for _ in range(100):
        d.say(guard(b"w1"), Beat([b"w1"]))
        d.tick()
    assert not d.sweeps


def test_late_words_of_a_worker_given_up_have_no_effect() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    d.die(a)
    d.emit(a, task, chunk(0, last=True))
    assert d.take(a, Who)
    assert not d.take(client, Output)
    b = d.worker("b", "a")
    (again,) = d.assigned(b)
    d.emit(b, task, chunk(0))  # an old attempt's number from the new worker
    assert not d.take(client, Output)
    d.emit(b, again, chunk(0, last=True))
    assert len(d.take(client, Output)) == 1


def test_a_client_that_is_gone_leaves_no_request_and_no_block() -> None:
    d = Driver(line("a", "b"))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client, given={"request": [chunk(0, last=True, handles=[handle(client, 0)])]})
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0, handles=[handle(a, 0)]))
    (consumer,) = d.assigned(b)
    d.lose(client)
    d.fail(a, task, "cancelled")
    d.fail(b, consumer, "cancelled")
    d.say(a, Release([handle(client, 0).block]))
    d.say(b, Release([handle(a, 0).block]))
    assert len(d.take(a, Free)) == 1
    assert d.reaped == [arena(client)]
    d.assert_empty()


def test_a_chunk_that_skips_a_number_is_an_attempt_lost() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(3, handles=[handle(a, 0)]))
    assert len(d.take(a, Free)) == 1
    assert d.take(a, Cancel)
    assert not d.take(client, Output)
    assert d.assigned(a)[0].attempt == 2


def test_a_handle_into_somebody_elses_arena_is_refused() -> None:
    d = Driver(line("a", "b", retry={"attempts": 1}))
    a, b, client = d.worker("a", "a"), d.worker("b", "b"), d.client()
    d.submit(client, 1)
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0, handles=[handle(b, 0)]))
    assert "arena" in d.take(client, Ended)[0].error.message  # type: ignore[union-attr]
    d.submit(client, 2, given={"request": [chunk(0, last=True, handles=[handle(a, 0)])]})
    assert d.take(client, Refused)[0].error.status == 400
    assert not d.take(b, Free)
    assert not d.take(a, Free)


def test_one_block_named_twice_is_refused() -> None:
    d = Driver(line("a", retry={"attempts": 1}))
    a, client = d.worker("a", "a", capacity=2), d.client()
    d.submit(client, 1)
    d.submit(client, 2)
    one, two = d.assigned(a)
    d.emit(a, one, chunk(0, handles=[handle(a, 0)]))
    d.emit(a, two, chunk(0, handles=[handle(a, 0)]))
    assert d.take(client, Ended)[0].tag == 2


def test_an_arena_name_that_covers_others_is_refused() -> None:
    d = Driver(line("a"))
    d.say(b"g1", Hello(VERSION, "", "a", "host", 1))
    for name in (f"omni-{RUN}-", "omni-", "/etc/", f"omni-{RUN}-../x-"):
        d.say(b"w1", Ready(VERSION, b"g1", 1, 1, name))
        d.say(b"c1", Connect(VERSION, "api", name))
        assert d.take(b"w1", Reject)
        assert d.take(b"c1", Reject)
        assert not d.take(b"c1", Connected)
    assert not d.core.workers


def test_releases_that_come_twice_or_from_strangers_free_nothing_twice() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a"), d.client()
    d.submit(client)
    (task,) = d.assigned(a)
    d.emit(a, task, chunk(0, last=True, handles=[handle(a, 0)]))
    block = handle(a, 0).block
    d.say(b"cstranger", Release([block]))
    assert not d.take(a, Free)
    d.say(client, Release([block, block]))
    d.say(client, Release([block]))
    assert len(d.take(a, Free)) == 1
    d.assert_empty()


def test_strangers_are_asked_who_they_are() -> None:
    d = Driver(line("a"))
    messages: list[Message] = [
        Beat(), Died(b"w", "x"), Failed(1, 0, 1, "item"), Finish(1, 0, 1),
        Emit(1, 0, 1, chunk(0)), Inspect(1, "status"), Submit(1, "line", ["out"], {}),
    ]  # fmt: skip
    for message in messages:
        d.say(b"xstranger", message)
        assert d.take(b"xstranger", Who), message
    d.assert_empty()


def test_a_ready_that_is_overtaken_by_its_engines_death_makes_no_worker() -> None:
    d = Driver(line("a"))
    d.say(b"g1", Hello(VERSION, "", "a", "host", 1))
    d.say(b"g1", Died(b"w1", "signal SIGKILL"))
    d.say(b"w1", Ready(VERSION, b"g1", 1, 1, arena(b"w1")))
    assert not d.core.workers


def test_a_worker_that_messages_cannot_reach_is_replaced() -> None:
    d = Driver(line("a"))
    a, client = d.worker("a", "a", capacity=2), d.client()
    d.submit(client, 1)
    assert d.assigned(a)
    d.lose(a)
    d.lose(a)
    (kill,) = d.take(guard(a), Kill)
    assert kill.worker == a
    d.submit(client, 2)
    assert not d.assigned(a), "it gets nothing more"
    d.die(a, kill.cause)
    assert len(d.assigned(d.worker("b", "a", capacity=2))) == 2


def test_tasks_that_have_given_something_are_not_suspected_when_their_worker_dies() -> None:
    d = Driver(line("a"))
    client = d.client()
    worker = d.worker("0", "a", capacity=4)
    for tag in range(3):
        d.submit(client, tag)
    tasks = d.assigned(worker)
    for task in tasks[:2]:
        d.emit(worker, task, chunk(0))
    d.die(worker)
    worker = d.worker("1", "a", capacity=4)
    again = d.assigned(worker)
    assert len(again) == 3, "one suspect is the culprit, and the others wait for nothing"
    assert [task.resume.emitted if task.resume else 0 for task in sorted(again, key=lambda t: t.request)] == [
        1,
        1,
        0,
    ]


def test_suspects_wait_only_until_the_one_before_has_given_something() -> None:
    d = Driver(line("a"))
    client = d.client()
    worker = d.worker("0", "a", capacity=4)
    for tag in range(3):
        d.submit(client, tag)
    d.die(worker)
    worker = d.worker("1", "a", capacity=4)
    for left in (2, 1, 0):
        (task,) = d.assigned(worker)
        d.emit(worker, task, chunk(0))
        assert d.core.tasks._board.pipelines["line"].stages[0].scheduler.length == max(left - 1, 0)


def test_a_guardian_that_dies_with_its_engine_blames_nobody() -> None:
    d = Driver(line("a", retry={"attempts": 1}))
    client = d.client()
    d.submit(client)
    for life in range(10):
        worker = d.worker(str(life), "a")
        assert len(d.assigned(worker)) == 1
        d.lose(guard(worker))
    assert not d.take(client, Ended)
    for life in range(10, 25):
        worker = d.worker(str(life), "a")
        d.assigned(worker)
        d.lose(guard(worker))
    (ended,) = d.take(client, Ended)
    assert ended.error is not None, "but not for ever"
    assert "20 attempts broke off" in ended.error.message
