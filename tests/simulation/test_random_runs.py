"""The core under random life: nothing lost, nothing doubled, nothing left."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.runner import run_all

FIRST, COUNT = int(os.environ.get("SIM_FIRST", "0")), int(os.environ.get("SIM_COUNT", "2000"))
ROOT = Path(__file__).parents[2]


def test_requests_survive_whatever_dies() -> None:
    failures = [
        failure for result in run_all(FIRST, COUNT, jobs=os.cpu_count() or 1) for failure in result.failures
    ]
    assert not failures, (
        f"{len(failures)} seeds fail; scripts/simulate --replay {failures[0][0]}: {failures[0][1]}"
    )


def test_a_seed_replays_exactly_in_another_process() -> None:
    def digest(hash_seed: str) -> str:
        command = [sys.executable, "-P", "-m", "tests.simulation", "--replay", "7"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        output = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False).stdout
        assert len(output.splitlines()) > 100
        return hashlib.sha256(output).hexdigest()

    assert digest("1") == digest("2")
