"""What many deaths and many callers that leave must not leave behind: nothing."""

from __future__ import annotations

from scripts.benchmarks import soak
from tests.chaos.sizes import SOAK, size

SLOPE_KIB = 3.0  #: a request; less is the allocator's


async def test_killed_engines_leave_no_segment_process_or_socket() -> None:
    found = await soak.killing(size(12, 1000), size(0.2, 0.7), size(2, 8))
    assert found["ready_again"]
    assert found["answered"] > 0
    assert found["lost"] == 0
    assert found["left_in_tables"] == {}
    assert found["orphaned_segments"] == 0
    leaked = {name: found[f"leaked_{name}"] for name in ("processes", "segments", "files", "after_restart")}
    assert not any(leaked.values()), leaked


async def test_callers_that_leave_leave_empty_tables_and_no_growth() -> None:
    found = await soak.leaving(size(60, 960), after_s=size(0.3, 1.0))
    assert found["left_in_tables"] == {}
    assert found["orphaned_segments"] == 0
    assert found["leaked_processes"] == found["leaked_segments"] == found["leaked_files"] == 0
    if SOAK:  # a short run sees the allocator find its size, and little else
        grown = {name: found[f"{name}_kib_per_request"] for name in ("broker", "gateway", "workers")}
        assert max(grown.values()) < SLOPE_KIB, grown
