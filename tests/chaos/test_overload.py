"""Several times the load that there is room for: what is let in gets done, the rest is told to come back."""

from __future__ import annotations

from scripts.benchmarks import overload
from tests.chaos.sizes import size

TRIES = 3  #: a machine that stands still for a second spoils a level, but not each time
SLACK_S = 5.0  #: the same; in a queue without a bound the last ones would wait for 9 s


async def test_twice_the_load_gets_as_much_done_as_there_is_room_for() -> None:
    argv = ["--seconds", str(size(3.0, 10.0)), "--levels", "1", "2", "4"]
    options = overload.parse(argv)
    for _ in range(size(TRIES, 1)):
        found = await overload.measure(options)
        assert found["bad_refusals"] == 0, found["levels"]
        assert found["left_in_tables"] == {}
        if found["goodput_2x_over_peak"] >= size(0.8, 0.95):
            break
    assert found["goodput_2x_over_peak"] >= size(0.8, 0.95), found["levels"]
    # Whoever is let in waits for those before it in the queue, and for nobody else.
    longest = (options.places + options.queue) / options.places * options.service
    assert found["p99_admitted_ms"] < (longest + size(SLACK_S, 1.0)) * 1e3
    assert found["memory_end_mib"] < found["memory_begin_mib"] * 1.5
