"""The default pipeline with its real models on three hosts says the same, in the same voice, as on one."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

import pipelines
from scripts.benchmarks.hosts import Cluster
from tests.hosts.rig import came_by, has, running

START_S = 400.0  #: vLLM takes 20 s on two idle cores
SPEAKERS = ("talker", "code2wav")
TEXT = "The sea is wide and blue. Ships sail on it, day and night. Fish live in it."


def voice(transport: str) -> dict[str, Any]:
    """The pipeline that ships, its tensors going one way from host to host."""
    file = Path(pipelines.__file__).parent / "voice" / "pipeline.yaml"
    document: dict[str, Any] = yaml.safe_load(file.read_text())
    for edge in document["edges"]:
        if edge["from"] in SPEAKERS:
            edge["transport"] = transport
    return document


def post(cluster: Cluster, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        cluster.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_S) as response:
            answer: bytes = response.read()
            return answer
    except OSError as error:
        raise AssertionError(f"{error}; {cluster.status()}; the logs:\n{cluster.log}") from error


def samples(data: bytes) -> npt.NDArray[np.int64]:
    with wave.open(io.BytesIO(data)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.int64)


def answer(cluster: Cluster) -> tuple[str, npt.NDArray[np.int64]]:
    """What `voice` writes and says to a question."""
    body = {
        "model": "voice",
        "messages": [{"role": "user", "content": "Tell me about the sea in two sentences."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
        **{"temperature": 0, "seed": 5, "max_tokens": 50},
    }
    message = json.loads(post(cluster, "/v1/chat/completions", body))["choices"][0]["message"]
    return message["audio"]["transcript"], samples(base64.b64decode(message["audio"]["data"]))


def speech(cluster: Cluster) -> npt.NDArray[np.int64]:
    """A text read aloud."""
    body = {"model": "voice", "voice": "alloy", "input": TEXT, "response_format": "wav", "seed": 3}
    return samples(post(cluster, "/v1/audio/speech", body))


def is_close(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> bool:
    """Whether two waveforms differ by one 16-bit step at most."""
    return one.shape == other.shape and int(np.abs(one - other).max()) <= 1


@pytest.mark.models
@pytest.mark.parametrize("transport", ["zmq", "ucx"])
def test_voice_on_three_hosts_says_what_it_says_on_one(tmp_path: Path, transport: str) -> None:
    """All of it on the broker's host first; then `talker` and `code2wav` on hosts of their own."""
    if not has(transport):
        pytest.skip("ucxx is not installed")
    with running(tmp_path, 3, [voice(transport)], {0: ["voice/thinker"]}, START_S) as three:
        here = [three.worker(0, f"voice/{stage}") for stage in SPEAKERS]
        three.until(lambda: places(three) == [[0], [0]], START_S)
        text, expected = answer(three)
        read = speech(three)
        assert len(expected) > 22_050
        for process in here:
            process.terminate()
        there = [three.worker(host, f"voice/{stage}") for host, stage in enumerate(SPEAKERS, 1)]
        three.until(lambda: places(three) == [[1], [2]], START_S)
        again, heard = answer(three)
        assert again == text
        assert is_close(heard, expected)
        assert is_close(speech(three), read)
        for process in there:
            process.terminate()
            process.wait(START_S)
        assert came_by(three.hosts[2]).keys() == {transport}, three.hosts[2].log


def places(cluster: Cluster) -> list[list[int]]:
    """On which hosts the living workers of each speaking stage are."""
    return [[worker.host for worker in cluster.workers(f"voice/{stage}")] for stage in SPEAKERS]
