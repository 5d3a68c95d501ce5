"""The bench command: what it lists, refuses and prints."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def bench(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMNI_SHM_DIR": str(folder)}
    return subprocess.run(
        [str(BENCH), *options], check=False, capture_output=True, text=True, timeout=120, env=env, cwd=folder
    )


def test_help_lists_the_benchmarks(tmp_path: Path) -> None:
    for options in ([], ["--help"]):
        got = bench(*options, folder=tmp_path)
        assert got.returncode == 0
        assert "payload" in got.stdout
        assert "common" not in got.stdout


def test_an_unknown_benchmark_is_refused(tmp_path: Path) -> None:
    got = bench("../evil", folder=tmp_path)
    assert got.returncode == 2
    assert "no benchmark '../evil'" in got.stderr


def test_payload_prints_json_last_and_leaves_no_segment(tmp_path: Path) -> None:
    got = bench("payload", "--no-broker", "--rounds", "3", "--sizes", "4096", "100000", folder=tmp_path)
    assert got.returncode == 0, got.stderr
    report = json.loads(got.stdout.splitlines()[-1])
    assert [row["bytes"] for row in report["rows"]] == [4096, 100000]
    for row in report["rows"]:
        assert min(row[key] for key in ("put_get_ms", "one_way_ms", "memcpy_ms", "zmq_copy_ms")) > 0
    assert report["command"] == "scripts/bench payload --no-broker --rounds 3 --sizes 4096 100000"
    assert list(tmp_path.iterdir()) == []
