"""What runs on a Ray node, without Ray."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from broker.placement import keeper


def test_the_end_of_a_worker_whose_children_hold_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid, file=sys.stderr); exit(3)"
    monkeypatch.setattr(keeper, "python", lambda *_: [sys.executable, "-c", code])
    kept = keeper.Keeper([], "")
    kept.begin()
    ended: list[tuple[int, str]] = []
    waiting = threading.Thread(target=lambda: ended.append(kept.wait()), daemon=True)
    waiting.start()
    waiting.join(60)
    assert ended, "its end goes unnoticed while they live"
    assert ended[0][0] == 3
    os.kill(int(ended[0][1]), signal.SIGKILL)
