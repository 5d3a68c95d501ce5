"""Several times the load that there is room for: what is let in gets done, the rest is told to come back."""

from __future__ import annotations

from scripts.benchmarks import overload
from tests.chaos.sizes import size


async def test_twice_the_load_gets_as_much_done_as_there_is_room_for() -> None:
    argv = ["--seconds", str(size(3.0, 10.0)), "--levels", "1", "2", "4"]
    options = overload.parse(argv)
    found = await overload.measure(options)
    assert found["bad_refusals"] == 0, found["levels"]
    assert found["goodput_2x_over_peak"] >= size(0.8, 0.95)
    # Whoever is let in waits for those before it in the queue, and for nobody else.
    longest = (options.places + options.queue) / options.places * options.service
    assert found["p99_admitted_ms"] < (longest + 1.0) * 1e3
    assert found["memory_end_mib"] < found["memory_begin_mib"] * 1.5
    assert found["left_in_tables"] == {}
