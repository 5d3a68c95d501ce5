"""Hosts are cut off, they and the broker killed at random: no answer is lost, cut, doubled or changed."""

from __future__ import annotations

import pytest

from scripts.benchmarks import partitions
from scripts.benchmarks.lan import missing
from tests.chaos.sizes import SOAK, size


def test_answers_survive_partitions_and_dead_hosts() -> None:
    if why := missing():
        pytest.skip(why)
    said: list[str] = []
    # A long cut takes 16 s; there is one in test_partitions.
    kinds = list(partitions.KINDS) if SOAK else ["short cut", "host killed", "broker killed"]
    options = partitions.parse(["--rounds", str(size(3, 40)), "--streams", "6", "--kinds", *kinds])
    found = partitions.measure(options, said.append)
    nothing = ("lost", "honest_errors", "duplicated_chunks", "gaps", "unequal", "not_back", "tracebacks")
    leaks = ("left_in_tables", "orphaned_segments", "leaked_segments", "leaked_processes", "leaked_files")
    wrong = {name: found[name] for name in (*nothing, *leaks) if found[name]}
    assert not wrong, (said, found["why"], found["why_unequal"], found["left"])
    assert found["requests"] > 0
