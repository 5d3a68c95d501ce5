"""scripts/setup and scripts/demo on machines that lack something: the cause, the cure, and nothing left."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from scripts.leftovers import files_in

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
    )


def test_without_a_fitting_python_it_says_which_one_it_needs(tmp_path: Path) -> None:
    got = run("setup", OMNI_VENV=str(tmp_path / "venv"), OMNI_PYTHON="/bin/false no-such-python")
    assert got.returncode == 1
    assert "setup failed: no Python from 3.11" in got.stderr
    assert "cure: install one" in got.stderr


def test_without_a_package_it_says_what_lacks_it(tmp_path: Path) -> None:
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    got = run(
        "setup", OMNI_VENV=str(tmp_path / "venv"), OMNI_EXTRAS="dev", OMNI_PYTHON=sys.executable, **nothing
    )
    assert got.returncode == 1
    assert "the package index lacks a package for this Python and machine" in got.stderr
    assert "cure: " in got.stderr
    assert not (tmp_path / "venv" / ".omni-setup").exists()


def test_with_nothing_to_do_it_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    root = SCRIPTS.parent
    made_from = (
        (root / "pyproject.toml").read_bytes() + (SCRIPTS / "setup").read_bytes() + f"{root} dev\n".encode()
    )
    (tmp_path / ".omni-setup").write_text(hashlib.sha256(made_from).hexdigest())
    there = files_in(tmp_path)
    got = run("setup", OMNI_VENV=str(tmp_path), OMNI_EXTRAS="dev")
    assert (got.returncode, got.stdout, got.stderr) == (0, "", "")
    assert files_in(tmp_path) == there


def test_the_demo_says_how_it_is_used() -> None:
    got = run("demo", "--help", OMNI_VENV=sys.prefix)
    assert got.returncode == 0
    for option in ("--text", "--voice", "--serve", "--output"):
        assert option in got.stdout
