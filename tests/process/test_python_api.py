"""`from broker import Omni`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from broker import Omni
from broker.api import AudioEvent, BrokerError, DoneEvent, OmniError, OutputEvent, TextEvent
from broker.client import BrokerGone
from broker.private import PrivateBroker
from pipelines.errors import PipelineError
from pipelines.graph import Pipeline, Stage
from tests.house import House, line, write

ROOT = Path(__file__).parents[2]
Houses = Callable[..., House]


@pytest.fixture
def omni(echo: House) -> Iterator[Omni]:
    with Omni("echo", address=echo.address) as connected:
        yield connected


def test_generate_gives_everything_typed(omni: Omni) -> None:
    result = omni.generate("three small words", seed=7)
    assert result.text == "three small words"
    assert result.audio is not None
    assert (result.audio.dtype, result.audio.shape, result.sample_rate) == (np.float32, (14_400,), 24_000)
    assert result.audio.flags.owndata
    assert [timing.stage for timing in result.timings] == ["say", "tone"]
    assert all(0 <= timing.started <= timing.ended for timing in result.timings)
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.audio_s) == (3, 3, pytest.approx(0.6))
    assert (result.finish_reason, result.seed) == ("stop", 7)


def test_text_alone_runs_no_other_stage(omni: Omni) -> None:
    result = omni.generate([{"role": "user", "content": "a b c"}], ["text"], max_tokens=2)
    assert (result.text, result.audio, result.sample_rate) == ("a b", None, None)
    assert result.finish_reason == "length"
    assert [timing.stage for timing in result.timings] == ["say"]


def test_stream_gives_pieces_that_join_to_the_result(omni: Omni) -> None:
    events = list(omni.stream("one two three", ["text", "audio", "image"]))
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert "".join(e.text for e in events if isinstance(e, TextEvent)) == done.result.text == "one two three"
    speech = np.concatenate([e.audio for e in events if isinstance(e, AudioEvent)])
    np.testing.assert_array_equal(speech, done.result.audio)
    (picture,) = [e for e in events if isinstance(e, OutputEvent)]
    assert picture.payload["image"].shape == (64, 64, 3)
    assert len(done.result.outputs["image"]) == 1


def test_a_closed_stream_aborts_its_request(omni: Omni, echo: House) -> None:
    events = omni.stream("one two three", ["text"], params={"say": {"hang": True, "at": 1}})
    assert next(events) == TextEvent("one")
    events.close()  # type: ignore[attr-defined]
    echo.until(lambda: echo.status()["tables"] == dict.fromkeys(echo.status()["tables"], 0))


def test_speak_and_its_speed(omni: Omni) -> None:
    slow, fast = omni.speak("two words"), omni.speak("two words", speed=2.0)
    assert slow.text == ""
    assert slow.audio is not None
    assert fast.audio is not None
    assert len(slow.audio) == 2 * len(fast.audio)


def test_failures_pass_through_typed(omni: Omni) -> None:
    with pytest.raises(BrokerError, match="on purpose") as caught:
        omni.generate("x", ["text"], params={"say": {"raise": "on purpose"}})
    assert (caught.value.error.stage, caught.value.error.attempts) == ("say", 3)
    with pytest.raises(BrokerError) as caught:
        omni.generate("x", ["text"], params={"say": {"max_tokens": "many"}})
    assert caught.value.error.status == 400


def test_what_a_pipeline_cannot_do_is_a_value_error(omni: Omni) -> None:
    with pytest.raises(ValueError, match="no output 'video'; it has: text, audio, image, checksum"):
        omni.generate("x", ["video"])
    with pytest.raises(ValueError, match="echo takes no audio"):
        omni.generate("x", audio=[np.zeros(1600, np.float32)])
    with pytest.raises(ValueError, match="no transcriptions endpoint"):
        omni.transcribe(np.zeros(1600, np.float32))
    with pytest.raises(ValueError, match="NaN"):
        omni.transcribe(np.full(1600, np.nan))


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_a_seed_that_no_message_holds_is_a_value_error_and_the_next_question_is_answered(
    omni: Omni, seed: int
) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        omni.generate("Hi", seed=seed)
    assert omni.generate("Hi", seed=(1 << 64) - 1).text


def test_it_joins_the_broker_that_runs_here(echo: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_RUN_DIR", str(echo.run_dir))
    before = set(echo.processes())
    with Omni("echo") as omni:
        assert omni.generate("hello", ["text"]).text == "hello"
        assert set(echo.processes()) <= before
    assert echo.is_ready()


def test_it_starts_a_broker_of_its_own_and_ends_it(house: Houses, tmp_path: Path) -> None:
    home = house()
    with Omni(write(tmp_path, line("a")), stage=["a.max_num_seqs=3"]) as omni:
        assert omni.pipeline.stages["a"].batch.max_num_seqs == 3
        assert home.processes()
        assert omni.address is not None
        folder = Path(omni.address.removeprefix("ipc://"))
        assert folder.is_dir()
    home.until(lambda: not home.processes())
    assert not folder.exists()
    with pytest.raises(OmniError, match="not started"):
        omni.generate("x")


def test_its_broker_dies_with_the_program(house: Houses) -> None:
    home = house()
    code = "from broker import Omni\nwith Omni('echo'): print('up', flush=True); input()"
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", code], env=home.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == b"up\n"
        assert len(home.processes()) > 5
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        program.stdin.close()
        program.stdout.close()
    home.until(lambda: not home.processes())


def test_a_model_for_all_stages_that_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    document = line("a", "b")
    document["stages"]["b"] = {"engine": "tests.process.steps_engine:StepsEngine", "model": "owner/name"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with Omni(write(tmp_path, document), model=str(tmp_path / "mine")) as omni:
        models = [stage.model for stage in omni.pipeline.stages.values()]
    assert models == [None, str(tmp_path / "mine")]
    with pytest.raises(PipelineError, match="no stage of echo has a model"):
        Omni("echo", model="gpt2").start()


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    file = write(tmp_path, line("a"))
    with pytest.raises(OmniError, match=r"ended with exit code 2; it said:\n.*cuda:7"):
        Omni(file, stage=["a.devices=cuda:7"]).start()


def test_a_temporary_folder_with_too_long_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OmniError, match="TMPDIR"):
        Omni("echo").start()
    assert list(deep.iterdir()) == []


def test_who_waits_while_another_thread_closes_it_gets_an_error(echo: House) -> None:
    omni = Omni("echo", address=echo.address)
    omni.start()
    broker = echo.process_of("broker.server")
    failed: list[BaseException] = []

    def wait() -> None:
        with pytest.raises((OmniError, BrokerError)) as raised:
            omni.generate("hello")
        failed.append(raised.value)

    waiting = threading.Thread(target=wait, daemon=True)
    os.kill(broker, signal.SIGSTOP)
    try:
        waiting.start()
        time.sleep(0.5)
        omni.close()
        waiting.join(30)
    finally:
        os.kill(broker, signal.SIGCONT)
    assert failed


class Loading(PrivateBroker):
    """One that runs, and has no process."""

    def __init__(self) -> None:
        self._process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]


async def test_a_broker_that_is_restarted_while_models_are_loaded() -> None:
    answers: list[Any] = [{"missing": ["line/a"]}, BrokerGone("it does not answer"), {"missing": []}]
    client = AsyncMock(inspect=AsyncMock(side_effect=answers))
    client.pipelines = {"line": Pipeline("line", {"text": "a"}, {"a": Stage("function")}, [], {})}
    await Loading().ready(client, 60)
    assert client.inspect.await_count == 3


def test_a_stage_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    document = line("a", "b")
    document["stages"]["b"] = {"engine": "no_such_module:Engine"}
    pipeline, says = write(tmp_path, document), ""
    for timeout_s in (8, 90):  # busy machines may not come to the engine's error within the first
        if "no_such_module" not in says:
            with pytest.raises(OmniError) as caught:
                Omni(pipeline, timeout_s=timeout_s).start()
            says = str(caught.value)
    assert re.search(r"line/b not ready after (8|90) s; the log:\n(.*\n)*.*no_such_module", says), says


def test_a_wrong_address_or_name_says_so(echo: House, tmp_path: Path) -> None:
    with pytest.raises(OmniError, match="no broker answers at"):
        Omni("echo", address=f"ipc://{tmp_path}").start()
    with pytest.raises(OmniError, match="serves no pipeline 'voice'; it serves: echo"):
        Omni("voice", address=echo.address).start()
    with pytest.raises(PipelineError, match="did you mean echo"):
        Omni("ecko").start()


def test_importing_the_package_is_light() -> None:
    code = "import sys, broker; print('zmq' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"
