"""What a peer has to tell a broker that was restarted, whatever came and went before."""

from __future__ import annotations

import msgspec

from adapters.handle import BlockId, Handle, size_of
from broker.protocol import Assign, Checkpoint, EdgeInput, Emit, Failed, Finish, Input, Resume, Who
from broker.session import DEAF, EngineSession, Session
from tests.core.driver import chunk, handle

OURS, THEIRS = b"w1", b"w2"


def assign(*inputs: EdgeInput, request: int = 1, resume: Resume | None = None) -> Assign:
    """A task of stage 0, first attempt."""
    return Assign(request, 0, 1, msgspec.Raw(b"\x80"), 7, list(inputs), resume)


def disk(place: str) -> Handle:
    """A handle into the disk store."""
    return Handle("disk", BlockId(place, 0, 0), 4, "float32", (1,))


def test_each_boot_gets_one_introduction_however_often_it_asks() -> None:
    session = Session(boot=1)
    assert [session.introduce(Who(boot)) for boot in (1, 2, 2, 3, 3)] == [
        "ignore",
        "introduce",
        "ignore",
        "introduce",
        "ignore",
    ]


def test_a_broker_that_goes_on_asking_has_not_heard_the_introduction() -> None:
    session = Session()
    answers = [session.introduce(Who(1)) for _ in range(2 * DEAF)]
    assert [at for at, answer in enumerate(answers) if answer == "introduce"] == [0, DEAF + 1]


def test_a_broker_that_has_answered_needs_no_introduction() -> None:
    session = Session()
    session.met(5)
    assert session.introduce(Who(5)) == "ignore"


def test_a_peer_that_was_given_up_learns_so_at_any_boot() -> None:
    session = Session(boot=1)
    assert session.introduce(Who(1, gone=True)) == "gone"
    assert session.introduce(Who(2, gone=True)) == "gone"


def test_an_input_that_lacks_the_one_before_it_is_noticed() -> None:
    session = EngineSession()
    session.assigned(assign(EdgeInput(0, [chunk(0)], closed=False)))
    assert session.fed(Input(1, 0, 1, EdgeInput(0, [chunk(1), chunk(2)], closed=False), 1))
    assert not session.fed(Input(1, 0, 1, EdgeInput(0, [chunk(4)], closed=True), 4))


def test_an_end_that_lacks_the_chunks_before_it_is_noticed() -> None:
    session = EngineSession()
    session.assigned(assign(EdgeInput(0, [chunk(0)], closed=False)))
    assert not session.fed(Input(1, 0, 1, EdgeInput(0, [], closed=True), 2))
    assert session.leases()[0].inputs == [(0, 1, False)]
    assert session.fed(Input(1, 0, 1, EdgeInput(0, [], closed=True), 1))


def test_an_input_after_a_gap_is_none_so_a_restarted_broker_sends_what_is_missing() -> None:
    session = EngineSession()
    session.assigned(assign(EdgeInput(4, [chunk(0)], closed=False)))
    for seq, in_order in ((2, False), (3, False), (1, True)):
        before = session.leases()[0].inputs
        assert session.fed(Input(1, 0, 1, EdgeInput(4, [chunk(seq)], closed=False), seq)) == in_order
        assert (session.leases()[0].inputs != before) == in_order


def test_a_block_is_held_as_often_as_it_came() -> None:
    session = Session()
    block = handle(THEIRS, 0)
    session.received([block, block, disk("name/file")])
    session.released([block.block])
    assert sorted(b.place for b in session.resync().holds) == sorted([block.block.place, "name/file"])
    session.released([block.block, disk("name/file").block])
    assert session.resync().holds == []


def test_a_lent_block_is_told_until_it_is_freed() -> None:
    session = Session()
    one, two = handle(OURS, 0), handle(OURS, 64)
    session.lend([one, two])
    session.freed([one.block, handle(OURS, 128).block])
    assert session.resync().lent == [two.block]


def test_a_new_life_knows_nothing_of_the_old_ones_blocks() -> None:
    session = Session()
    session.received([handle(THEIRS, 0)])
    session.lend([handle(OURS, 0)])
    session.begin_anew()
    assert session.resync().holds == session.resync().lent == []


def test_results_are_kept_in_order_until_they_are_seen() -> None:
    session = EngineSession()
    session.assigned(assign())
    results = [
        Emit(1, 0, 1, chunk(0)),
        Checkpoint(1, 0, 1, chunk(1)),
        Emit(1, 0, 1, chunk(1)),
        Finish(1, 0, 1),
    ]
    for result in results:
        session.sent(result)
    assert session.unseen() == results
    assert session.results_seen == 0
    session.seen(2)
    assert session.unseen() == results[2:]
    assert session.results_seen == 2
    session.seen(1)  # an older message can't take back a newer one
    assert session.results_seen == 2
    session.seen(99)
    assert session.unseen() == []
    assert session.results_seen == 4


def test_a_task_that_has_ended_is_announced_until_its_end_was_seen() -> None:
    """Else the broker would run it again, although its results come right after the announcement."""
    session = EngineSession()
    last = Emit(1, 0, 1, chunk(0))
    for request, end in ((1, last), (2, Finish(2, 0, 1)), (3, Failed(3, 0, 1, "cancelled"))):
        session.assigned(assign(request=request))
        session.sent(end)
    last.chunk.last = True  # it still waited to be sent when its job ended
    assert [lease.request for lease in session.leases()] == [1, 2, 3]
    session.seen(1)
    assert [lease.request for lease in session.leases()] == [2, 3]
    session.seen(3)
    assert session.leases() == []


def test_a_chunk_that_is_not_the_last_ends_nothing() -> None:
    session = EngineSession()
    session.assigned(assign())
    session.sent(Emit(1, 0, 1, chunk(0)))
    session.sent(Checkpoint(1, 0, 1, chunk(1)))
    session.seen(2)
    assert [lease.request for lease in session.leases()] == [1]


def test_a_lease_says_how_much_of_each_edge_has_come() -> None:
    session = EngineSession()
    session.assigned(assign(EdgeInput(0, [chunk(0), chunk(1)], closed=False), EdgeInput(2, [], closed=True)))
    session.fed(Input(1, 0, 1, EdgeInput(0, [chunk(2)], closed=False), 2))
    (lease,) = session.leases()
    assert lease.inputs == [(0, 3, False), (2, 0, True)]
    session.fed(Input(1, 0, 1, EdgeInput(0, [], closed=True), 3))
    (lease,) = session.leases()
    assert lease.inputs == [(0, 3, True), (2, 0, True)]


def test_all_blocks_of_an_assignment_are_held_and_those_of_inputs_that_come_too_late() -> None:
    session = EngineSession()
    handles = [handle(THEIRS, offset) for offset in (0, 64, 128)]
    resume = Resume(1, [], chunk(1, handles=[handles[0]]))
    session.assigned(assign(EdgeInput(0, [chunk(0, handles=[handles[1]])], closed=False), resume=resume))
    session.fed(Input(99, 0, 1, EdgeInput(0, [chunk(1, handles=[handles[2]])], closed=True), 1))
    assert sorted(b.offset for b in session.resync().holds) == [0, 64, 128]


def test_blocks_of_results_are_lent() -> None:
    session = EngineSession()
    session.sent(Emit(1, 0, 1, chunk(0, handles=[handle(OURS, 0)])))
    session.sent(Checkpoint(1, 0, 1, chunk(1, handles=[handle(OURS, 64)])))
    session.seen(2)
    assert [b.offset for b in session.resync().lent] == [0, 64]


def test_a_chunks_size_counts_its_tensors() -> None:
    small = chunk(0)
    assert size_of(chunk(0, handles=[handle(OURS, 0), handle(OURS, 64)])) == size_of(small) + 8
