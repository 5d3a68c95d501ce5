"""Processes that only watch and decide stay small: NumPy brings a thread for each core of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["broker.server", "broker.supervisor", "workers.guardian"])
def test_what_watches_and_decides_loads_no_numpy_and_has_one_thread(module: str) -> None:
    code = f"import os, sys, {module}; print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False 1\n"
