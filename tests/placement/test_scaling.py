"""How many workers a stage should have, as a table of lives; then through the core, as status shows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from broker.core.scaling import Scaler
from broker.protocol import VERSION, Connect, Inspect, Report, Unplaced
from pipelines.graph import Bounds, Resources, Scaling
from tests.core.driver import Driver, line

SETTINGS = Scaling(queue_per_worker=2, up_s=2, down_s=60, cooldown_s=10)


class Look(NamedTuple):
    """What the tick at ``at`` seconds sees, and what is wanted after it."""

    at: float
    queued: int
    busy: int
    wanted: int
    guardians: int = 0


CASES: dict[str, tuple[Any, list[Look]]] = {
    "a number stays, however long the queue": (
        2,
        [Look(0, 99, 2, 2), Look(99, 99, 2, 2), Look(999, 0, 0, 2)],
    ),
    "by hand stays by hand": (0, [Look(0, 99, 0, 0), Look(99, 99, 3, 0, guardians=3)]),
    "the bound itself is not above it": (Bounds(1, 4), [Look(0, 2, 1, 1), Look(50, 2, 1, 1)]),
    "one more when it has been too long for two seconds": (
        Bounds(1, 4),
        [Look(0, 3, 1, 1), Look(1, 3, 1, 1), Look(2, 3, 1, 2)],
    ),
    "a queue that was short in between begins anew": (
        Bounds(1, 4),
        [Look(0, 3, 1, 1), Look(1, 2, 1, 1), Look(2, 3, 1, 1), Look(3, 3, 1, 1), Look(4, 3, 1, 2)],
    ),
    "one step per cool-down, also while the new worker loads": (
        Bounds(1, 4),
        [Look(0, 99, 1, 1), Look(2, 99, 1, 2), Look(11, 99, 1, 2), Look(12, 99, 1, 3), Look(22, 99, 1, 4)],
    ),
    "never above the most": (Bounds(1, 2), [Look(0, 99, 1, 1), Look(2, 99, 1, 2), Look(99, 99, 2, 2)]),
    "what is wanted already need not be there": (
        Bounds(1, 4),
        [Look(0, 4, 1, 1), Look(2, 4, 1, 2), Look(60, 4, 1, 2)],
    ),
    "one less when one has been idle for a minute, then one per cool-down": (
        Bounds(1, 3),
        [
            Look(0, 0, 0, 3, guardians=3),
            Look(59, 0, 1, 3),
            Look(60, 0, 1, 2),
            Look(69, 0, 1, 2),
            Look(70, 0, 2, 2),
            Look(71, 0, 0, 2),
            Look(131, 0, 0, 1),
            Look(999, 0, 0, 1),
        ],
    ),
    "a worker that was busy in between begins anew": (
        Bounds(1, 2),
        [Look(0, 0, 1, 2, guardians=2), Look(59, 0, 2, 2), Look(60, 0, 1, 2), Look(120, 0, 1, 1)],
    ),
    "something that waits is not idleness": (
        Bounds(1, 2),
        [Look(0, 0, 1, 2, guardians=2), Look(30, 1, 1, 2), Look(31, 0, 1, 2), Look(61, 0, 1, 2)],
    ),
    "from none at once, and back": (
        Bounds(0, 2),
        [Look(0, 0, 0, 0), Look(1, 1, 0, 1), Look(2, 0, 1, 1), Look(3, 0, 0, 1), Look(63, 0, 0, 0)],
    ),
    "a restarted broker keeps what works": (
        Bounds(1, 3),
        [Look(0, 0, 2, 2, guardians=2), Look(1, 0, 2, 2, guardians=0)],
    ),
    "but not more than the most": (Bounds(1, 3), [Look(0, 0, 5, 3, guardians=5)]),
}


@pytest.mark.parametrize("case", CASES)
def test_decisions(case: str) -> None:
    replicas, looks = CASES[case]
    scaler = Scaler(Resources(replicas=replicas, scaling=SETTINGS))
    for look in looks:
        scaler.look(1000 + look.at, queued=look.queued, busy=look.busy, guardians=look.guardians)
        assert scaler.wanted == look.wanted, look


@pytest.mark.parametrize(
    ("settings", "looks"),
    [
        (Scaling(queue_per_worker=0.5), [Look(0, 1, 1, 1), Look(2, 1, 1, 2)]),
        (Scaling(up_s=0), [Look(0, 3, 1, 2)]),
        (Scaling(up_s=0, cooldown_s=1), [Look(0, 99, 1, 2), Look(1, 99, 1, 3)]),
        (
            Scaling(down_s=5, cooldown_s=0),
            [Look(0, 0, 0, 3, guardians=3), Look(5, 0, 0, 2), Look(6, 0, 0, 1)],
        ),
    ],
    ids=["queue_per_worker", "up_s", "cooldown_s", "down_s"],
)
def test_each_setting_has_its_effect(settings: Scaling, looks: list[Look]) -> None:
    scaler = Scaler(Resources(replicas=Bounds(1, 3), scaling=settings))
    for look in looks:
        scaler.look(1000 + look.at, queued=look.queued, busy=look.busy, guardians=look.guardians)
        assert scaler.wanted == look.wanted, look


RANGE = {"replicas": {"min": 1, "max": 3}, "scaling": {"up_s": 1, "down_s": 5, "cooldown_s": 1}}


def ask(driver: Driver, what: str) -> dict[str, Any]:
    """A report of the core."""
    client = driver.client("inspector")
    driver.say(client, Inspect(1, what))
    report: dict[str, Any] = msgspec.msgpack.decode(driver.take(client, Report)[-1].body)
    return report


def replicas(driver: Driver) -> dict[str, Any]:
    """What status says of the stage `a`."""
    told: dict[str, Any] = ask(driver, "status")["pipelines"]["line"]["stages"]["a"]["replicas"]
    return told


def test_the_queue_of_a_stage_drives_it_and_status_says_why() -> None:
    driver = Driver(line("a", resources=RANGE))
    driver.tick()
    told = replicas(driver)
    assert told == {
        "min": 1, "max": 3, "wanted": 1, "present": 0, "why": "the least", "since_s": 0.0, "trouble": "",
    }  # fmt: skip
    worker, client = driver.worker("1", "a"), driver.client()
    for tag in range(4):
        driver.submit(client, tag)
    driver.tick()
    driver.tick()
    told = replicas(driver)
    assert (told["wanted"], told["present"], told["since_s"]) == (2, 1, 0.0)
    assert told["why"] == "3 queued for 1, for 1.0 s"
    stage = ask(driver, "metrics")["stages"][0]
    assert [stage[f"replicas_{name}"] for name in ("wanted", "min", "max")] == [2, 1, 3]
    for _ in range(4):
        (task,) = driver.assigned(worker)
        driver.finish(worker, task)
    for _ in range(7):
        driver.tick()
    assert replicas(driver)["wanted"] == 1
    assert replicas(driver)["why"] == "0 of 2 busy, for 5.0 s"


def test_who_places_learns_what_each_guardian_has_to_do() -> None:
    driver = Driver(line("a", resources=RANGE))
    driver.worker("1", "a")
    driver.submit(driver.client())
    assert ask(driver, "placement") == {
        "stages": [{"stage": "line/a", "wanted": 1, "guardians": [["host", 1, 1]]}]
    }


def test_what_can_not_be_placed_is_told_until_its_placer_says_otherwise_or_leaves() -> None:
    driver = Driver(line("a", resources=RANGE))
    driver.say(b"cplacer", Connect(VERSION, "placer"))
    driver.say(b"cplacer", Unplaced({"line/a": "no node has 99 CPUs"}))
    assert replicas(driver)["trouble"] == "no node has 99 CPUs"
    driver.say(b"cplacer", Unplaced({}))
    assert replicas(driver)["trouble"] == ""
    driver.say(b"cplacer", Unplaced({"line/a": "again"}))
    for _ in range(8):
        driver.tick()
    assert replicas(driver)["trouble"] == ""
