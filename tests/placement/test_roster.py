"""The difference between what is wanted and what is kept, without processes."""

from __future__ import annotations

from broker.placement.roster import Guardian, Post, Roster, posts
from tests.core.driver import line


class Worker:
    def __init__(self, place: int) -> None:
        self.place = place
        self.gone = False
        self.drained = False

    @property
    def guardian(self) -> Guardian | None:
        return ("host", self.place)

    def drain(self) -> None:
        self.drained = True


class Office:
    """A roster of one stage of at most three, and whom it has hired."""

    def __init__(self, least: int = 1) -> None:
        self.hired: list[Worker] = []
        pipeline = line("a", resources={"replicas": {"min": least, "max": 3}})
        self.roster: Roster[Worker] = Roster(posts([pipeline]), self.hire)

    def hire(self, post: Post, place: int) -> Worker:
        assert post.label == "line/a"
        self.hired.append(Worker(place))
        return self.hired[-1]

    def follow(self, wanted: int, **tasks: int) -> list[int]:
        """Carries a report out; gives the places that are kept."""
        guardians = [["host", int(place[1:]), number] for place, number in tasks.items()]
        self.roster.follow({"stages": [{"stage": "line/a", "wanted": wanted, "guardians": guardians}]})
        return sorted(self.roster.kept("line/a"))


def test_it_begins_with_the_least_and_fills_places_from_below() -> None:
    office = Office()
    office.roster.begin()
    assert [worker.place for worker in office.hired] == [0]
    assert office.follow(3) == [0, 1, 2]
    assert office.follow(3) == [0, 1, 2]
    assert len(office.hired) == 3


def test_the_one_with_the_least_to_do_leaves_and_of_several_the_latest() -> None:
    office = Office()
    assert office.follow(3) == [0, 1, 2]
    assert office.follow(2, p0=4, p1=1, p2=2) == [0, 2]
    assert office.follow(1, p0=0, p2=0) == [0]
    assert [worker.drained for worker in office.hired] == [False, True, True]


def test_a_place_is_free_only_when_its_worker_has_left() -> None:
    office = Office()
    assert office.follow(3) == [0, 1, 2]
    assert office.follow(2) == [0, 1]
    assert office.follow(3) == [0, 1], "the device of the one that leaves is still in use"
    assert len(office.roster.workers()) == 3
    office.hired[2].gone = True
    assert office.follow(3) == [0, 1, 2]
    assert len(office.hired) == 4


def test_none_at_all_when_none_is_wanted() -> None:
    office = Office(least=0)
    office.roster.begin()
    assert office.hired == []
    assert office.follow(1) == [0]
    assert office.follow(0) == []
