"""Optional libraries: a missing one is named with its cure, and none reports to its maker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.optional import MissingLibrary, library


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(MissingLibrary, match=r"no_such_library.*pip install 'omni-broker\[speech\]'"):
        library("no_such_library", "speech")


def run(script: str, home: Path, **env: str) -> str:
    """What a script prints in a process of its own, with an empty home."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ORT_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def test_the_runtime_of_the_voices_leaves_no_traces_in_the_home_folder(tmp_path: Path) -> None:
    pytest.importorskip("piper")
    engine = "from workers.optional import library; library('piper.phonemize_espeak', 'speech')"
    run(f"{engine}; library('onnxruntime', 'speech')", tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_user_who_wants_to_report_can(tmp_path: Path) -> None:
    script = "import os; from pipelines.telemetry import no_telemetry; no_telemetry(); "
    script += "print(os.environ['ORT_DISABLE_TELEMETRY'], os.environ['VLLM_NO_USAGE_STATS'])"
    assert run(script, tmp_path, ORT_DISABLE_TELEMETRY="0") == "0 1"


def test_a_converter_leaves_no_traces_in_the_home_folder_either(tmp_path: Path) -> None:
    """diffusers imports the runtime of the voices, if it is there, which writes to a data base at once."""
    pytest.importorskip("onnxruntime")
    making = f"from pipelines.convert.__main__ import main; main(['sd3_tiny', '', '{tmp_path}/made'])"
    run(f"{making}; import onnxruntime", tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "made" not in path.parts] == []
