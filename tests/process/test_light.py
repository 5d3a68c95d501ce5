"""What processes take: those that watch and decide stay small, engines keep the memory of their steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import House
from workers.guardian import MALLOC


@pytest.mark.parametrize("module", ["broker.server", "broker.supervisor", "workers.guardian"])
def test_what_watches_and_decides_loads_no_numpy_and_has_one_thread(module: str) -> None:
    code = f"import os, sys, {module}; print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False 1\n"


def test_engines_keep_the_memory_that_a_step_frees_unless_their_user_says_otherwise(
    house: Callable[..., House],
) -> None:
    chosen = {"MALLOC_TRIM_THRESHOLD_": "1000000"}
    home = house("--pipeline", "echo", env=chosen)
    for pid in home.pids("echo", "tone"):
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        found = dict(line.split("=", 1) for line in environ if line.startswith("MALLOC_"))
        assert found == MALLOC | chosen
