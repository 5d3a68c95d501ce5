"""`omni-broker ask`, `status`, `models` and `--version`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import wave
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from broker import shadow
from tests.house import House, line, module, write

Houses = Callable[..., House]


def test_ask_prints_the_answer_and_writes_the_speech(echo: House, tmp_path: Path) -> None:
    file = tmp_path / "answer.wav"
    asked = echo.command("ask", "say these four words", "--audio", str(file))
    assert (asked.returncode, asked.stdout) == (0, "say these four words\n")
    assert "first token after" in asked.stderr
    assert "first audio after" in asked.stderr
    with wave.open(str(file)) as speech:
        assert (speech.getnchannels(), speech.getsampwidth(), speech.getframerate()) == (1, 2, 24_000)
        assert speech.getnframes() == round(4 * 0.2 * 24_000)
        samples = np.frombuffer(speech.readframes(speech.getnframes()), "<i2")
    assert np.abs(samples).max() == 16_384  # half of full scale


def test_ask_without_audio_runs_no_stage_for_it(echo: House) -> None:
    before = echo.stage("echo", "tone")["tasks"]["attempts"]
    assert echo.command("ask", "text only", "--max-tokens", "1").stdout == "text\n"
    assert echo.stage("echo", "tone")["tasks"]["attempts"] == before


def test_ask_says_in_one_line_what_is_wrong(echo: House, house: Houses, tmp_path: Path) -> None:
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"no audio at all")
    for arguments, says, code in (
        ([], "nothing to ask", 2),
        (["hi", "--pipeline", "voice"], "name one with --pipeline: echo", 2),
        (["hi", "--file", str(noise)], "not an audio file", 2),
        (["hi", "--audio", str(tmp_path / "no" / "folder.wav")], "No such file", 1),
    ):
        result = echo.command("ask", *arguments)
        assert (result.returncode, result.stdout) == (code, "")
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    alone = house().command("ask", "anybody there?")
    assert alone.returncode == 1
    assert "omni-broker start" in alone.stderr


def test_an_answer_that_does_not_come_leaves_the_file_that_was_there(
    echo: House, house: Houses, tmp_path: Path
) -> None:
    earlier, pipe, link = tmp_path / "answer.wav", tmp_path / "pipe", tmp_path / "link.wav"
    earlier.write_bytes(b"precious")
    os.mkfifo(pipe)
    link.symlink_to(earlier)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for file in (earlier, pipe, link):
            assert house().command("ask", "anybody there?", "--audio", str(file)).returncode == 1
            assert echo.command("ask", "hi", "--audio", str(file), "--pipeline", "voice").returncode == 2
    finally:
        os.close(reader)
    assert earlier.read_bytes() == b"precious"
    assert pipe.is_fifo()
    assert {file.name for file in tmp_path.iterdir()} == {"answer.wav", "pipe", "link.wav"}
    assert echo.command("ask", "hi", "--audio", str(link)).returncode == 0
    assert link.is_symlink()
    assert earlier.read_bytes()[:4] == b"RIFF"


@pytest.mark.parametrize("option", ["--seed", "--max-tokens"])
def test_a_number_that_no_message_can_hold_is_refused(echo: House, option: str) -> None:
    result = echo.command("ask", "hi", option, str(10**30))
    assert result.returncode == 2
    assert option in result.stderr
    assert "Traceback" not in result.stderr


def test_output_that_nobody_takes_is_no_traceback(echo: House) -> None:
    full = Path("/dev/full")
    for arguments in (("ask", "hi"), ("status",), ("status", "--json")):
        with full.open("wb") as nowhere:
            result = subprocess.run(
                module("broker.cli", *arguments),
                env=echo.env,
                stdout=nowhere,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert result.returncode == 1
        assert "No space left on device" in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
    read, write_end = os.pipe()
    os.close(read)
    with open(write_end, "wb") as closed:
        words = " ".join(map(str, range(200)))
        asked = subprocess.run(
            module("broker.cli", "ask", words),
            env=echo.env,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (asked.returncode, asked.stderr) == (1, b"")


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", b"one ? two\n"), ("latin-1", b"one ? two\n")])
def test_an_answer_that_the_terminal_can_not_show(echo: House, encoding: str, printed: bytes) -> None:
    command = module("broker.cli", "ask", "one \u20ac two")
    env = {**echo.env, "PYTHONIOENCODING": encoding}
    asked = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert (asked.returncode, asked.stdout) == (0, printed), asked.stderr


@pytest.mark.parametrize("command", ["ask hello", "status", "dead-letters"])
def test_no_output_at_all(echo: House, command: str) -> None:
    line = f"{shlex.join(module('broker.cli'))} {command} >&-"
    asked = subprocess.run(line, shell=True, env=echo.env, capture_output=True, timeout=60, check=False)
    assert asked.returncode == 0, asked.stderr
    assert b"Traceback" not in asked.stderr


@pytest.mark.parametrize("command", [["ask"], ["dead-letters", "show"], ["dead-letters", "drop"]])
def test_an_argument_that_is_no_text(echo: House, command: list[str]) -> None:
    asked = echo.command(*command, os.fsdecode(b"a\xffb"))
    assert asked.returncode in {1, 2}
    assert len(asked.stderr.splitlines()) == 1, asked.stderr


def test_ask_with_voice_to_a_pipeline_that_does_not_listen(echo: House, tmp_path: Path) -> None:
    file = tmp_path / "question.wav"
    with wave.open(str(file), "wb") as question:
        question.setnchannels(1)
        question.setsampwidth(2)
        question.setframerate(8000)
        question.writeframes(bytes(16_000))
    result = echo.command("ask", "--file", str(file))
    assert result.returncode == 2
    assert result.stderr == "omni-broker: echo takes no audio\n"


def test_status_as_a_table_and_as_json(echo: House) -> None:
    table = echo.command("status")
    assert table.returncode == 0
    assert "echo/picture" in table.stdout
    assert "ready" in table.stdout
    (pid,) = echo.pids("echo", "sum")
    assert str(pid) in table.stdout
    report = json.loads(echo.command("status", "--json").stdout)
    assert report["ready"] is True
    assert [worker["pid"] for worker in report["pipelines"]["echo"]["stages"]["sum"]["workers"]] == [pid]


def test_status_names_the_stages_without_a_worker(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--no-workers", ready=False)
    assert home.status()["missing"] == ["line/a"]  # it is there
    assert "no worker for line/a" in home.command("status").stdout


def test_models_list_shows_what_is_cached(house: Houses, tmp_path: Path) -> None:
    listed = house(env={"OMNI_CACHE": str(tmp_path)}).command("models", "list")
    assert listed.returncode == 0
    for name in ("smollm2-135m-instruct", "piper-en-us-joe", "whisper-base"):
        (row,) = [row for row in listed.stdout.splitlines() if row.startswith(name)]
        assert row.split()[-1] == "no"
    assert str(tmp_path) in listed.stdout


def test_pulling_an_unknown_model_names_the_known_ones(house: Houses) -> None:
    pulled = house().command("models", "pull", "whisper-bass")
    assert pulled.returncode == 1
    assert "did you mean whisper-base?" in pulled.stderr


def test_version(house: Houses) -> None:
    assert house().command("--version").stdout == f"omni-broker {version('omni-broker')}\n"


def test_a_package_of_another_distribution_is_named(tmp_path: Path) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").touch()
    for command in (module("broker.cli", "--version"), module("workers.cli", "--stage", "a")):
        result = subprocess.run(
            command,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 2
        assert f"Python finds {tmp_path}/pipelines" in result.stderr
    assert shadow.find() is None
