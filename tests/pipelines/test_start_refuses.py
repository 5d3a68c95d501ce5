"""`omni-broker start` ends at once, in one line, when a pipeline can't run: before any process is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "key": (["--stage", "thinker.max_num_seq=3"], "did you mean max_num_seqs?"),
    "stage": (["--stage", "9.max_num_seqs=3"], "no stage '9'; Allowed: ears, thinker, talker, code2wav"),
    "pipeline": (["--pipeline", "voise"], "did you mean voice?"),
    "alias": (["--omni-stage-config", "no/such.yaml"], "no/such.yaml: no such file"),
    "model": (["--pipeline", "echo", "--model", "gpt2"], "no stage of echo has a model"),
    "empty model": (["--model", "{empty}"], "this folder is empty"),
    "empty folder": (["--pipeline", "{empty}"], "there is no pipeline.yaml in this folder"),
    "gpu": (["--stage", "thinker.devices=cuda:700"], "'cuda:700' is not on this machine"),
    "ranks": (
        ["--stage", "thinker.devices=[cpu]", "--stage", "thinker.tensor-parallel-size=4"],
        "4 ranks, but devices lists only 1",
    ),
    "settings of another store": (["--mooncake-replicas", "3"], "of no use without --store mooncake"),
    "no master": (["--store", "mooncake"], "--store mooncake needs a master: start one"),
    "no address": (
        ["--store", "mooncake", "--mooncake-master", "here"],
        "'here' is no address of a Mooncake master: HOST:PORT",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_start_ends_with_one_line(tmp_path: Path, case: str) -> None:
    options, says = CASES[case]
    (empty := tmp_path / "empty").mkdir()
    options = [option.format(empty=empty) if "{" in option else option for option in options]
    command = [sys.executable, "-P", "-m", "broker.cli", "start", "--port", "0", *options]
    environment = {**os.environ, "OMNI_RUN_DIR": str(tmp_path / "run")}
    got = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)
    assert got.returncode == 2
    assert says in got.stderr
    assert len(got.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []
