"""The default pipeline with its real models, started once the way a user does."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import wave
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from broker.client import Client
from scripts.leftovers import files_in, processes_of
from scripts.ports import free_port
from tests.house import GONE_S, PatientClient
from tests.leftovers import process_of, until

START_S = 240.0  #: vLLM takes up to a minute on two cores, more when models must be pulled
PIPELINE = "voice"


class House:
    """`omni-broker start` and its address."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.address = f"ipc://{folder}/run"
        self.env = {**os.environ, "OMNI_RUN_DIR": f"{folder}/run", "OMNI_SHM_DIR": f"{folder}/shm"}
        self.env["OMNI_STATE_DIR"] = f"{folder}/state"
        self.log = folder / "log"
        self.shm = folder / "shm"
        self.shm.mkdir()
        command = [sys.executable, "-P", "-m", "broker.cli", "start", "--port", str(port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        """Raises with the log's end when that takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"voice did not come up:\n{self.log.read_text(errors='replace')[-4000:]}")

    def worker(self, stage: str) -> subprocess.Popen[bytes]:
        """One more worker, as `omni-worker --stage` starts it."""
        command = [sys.executable, "-P", "-m", "workers.cli", "--stage", stage]
        return subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL)

    def process_of(self, module: str) -> int:
        """The one process that runs a module of ours, once there is one: it may be being started again."""
        return process_of(self.folder, module)

    def stop(self) -> None:
        """Stops everything and checks that nothing is left."""
        self.process.terminate()
        assert self.process.wait(90) == 0, self.log.read_text(errors="replace")[-4000:]
        until(lambda: not processes_of(self.folder), "all processes to end", GONE_S)
        assert files_in(self.shm) == []


@pytest.fixture(scope="session")
def voice() -> Iterator[House]:
    """The running pipeline."""
    with tempfile.TemporaryDirectory(prefix="omni-e2e-", dir="/dev/shm") as folder:
        house = House(Path(folder), free_port())
        try:
            house.wait_until_ready()
            yield house
        finally:
            house.stop()


@pytest.fixture
async def client(voice: House) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, unmodified; whatever the last test has killed is back."""
    await asyncio.to_thread(voice.wait_until_ready)
    async with openai.AsyncOpenAI(base_url=f"{voice.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def broker(voice: House) -> AsyncIterator[Client]:
    """A look behind the gateway."""
    async with PatientClient(voice.address, kind="cli") as client:
        yield client


def samples(data: bytes) -> np.ndarray:
    """A WAV file's int16 samples; at most one header, and all bytes accounted for."""
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def words(text: str) -> list[str]:
    """Lower-case words without punctuation; the figures that Whisper likes to write stay figures."""
    return re.findall(r"[a-z0-9']+", text.lower().replace("-", " "))


def word_errors(said: list[str], heard: list[str]) -> int:
    """Levenshtein distance in words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]
