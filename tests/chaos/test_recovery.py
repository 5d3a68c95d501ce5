"""Every kind of death under load: no answer is lost, cut, doubled or changed."""

from __future__ import annotations

import pytest

from scripts.benchmarks import recovery
from scripts.benchmarks.common import Report
from scripts.benchmarks.deaths import KINDS
from tests.chaos.sizes import size


async def test_answers_survive_every_kind_of_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recovery.LIMIT_S, "echo", size(8.0, 20.0))  # a hung engine is found after it
    argv = ["--kills", str(size(len(KINDS), 100)), "--seconds-between", str(size(1.5, 3.0))]
    found = await recovery.measure(recovery.parse([*argv, "--streams", "6"]), Report("recovery", argv))
    nothing = ("lost", "duplicated_chunks", "gaps", "unequal", "text_flips", "hung_not_found")
    leaks = ("orphaned_segments", "leaked_segments", "leaked_processes", "leaked_files", "tracebacks")
    wrong = {name: found[name] for name in (*nothing, *leaks) if found[name]}
    assert not wrong, (found["why_lost"], found["why_unequal"])
    assert found["left_in_tables"] == {}
    assert found["requests"] > 0
    if size(0, 1):
        assert found["resume_p50_s"] < 1.0
        assert found["recomputed_share"] <= 0.10
