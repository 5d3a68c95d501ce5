"""A broker, a gateway and workers of small pipelines without models, all real processes."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from broker.client import Client
from pipelines.graph import (
    REQUEST,
    Batch,
    Edge,
    Endpoint,
    Limits,
    Pipeline,
    Resources,
    Retry,
    Stage,
)

CONTEXT = 64  #: words that the pipeline `tiny` can hold


def _say(**options: Any) -> Stage:
    return Stage("function", options={"op": "say", **options}, batch=Batch(max_num_seqs=64))


def pipelines() -> list[Pipeline]:
    """Six small ones.

    `echo` has text and speech, `narrow` takes few requests, `tiny` has a short context. `digest` hears: it
    answers with a checksum of the samples. `senses` takes everything, and answers with a checksum of what its
    two stages got. `sketch` draws, edits and films.
    """
    nobody = Resources(replicas=0)
    echo = Pipeline(
        "echo",
        outputs={"text": "say", "audio": "tone", "checksum": "sum"},
        stages={
            "say": _say(),
            "tone": Stage("function", options={"op": "tone"}, batch=Batch(max_num_seqs=64)),
            "sum": Stage("function", options={"op": "sum"}, resources=nobody),
        },
        edges=[Edge(REQUEST, "say"), Edge("say", "tone"), Edge("tone", "sum")],
        endpoints={
            "chat": Endpoint(outputs=["text", "audio"]),
            "speech": Endpoint(outputs=["audio"]),
        },
    )
    one = Stage("function", options={"op": "say"}, batch=Batch(max_num_seqs=1), retry=Retry(attempts=2))
    chat = {"chat": Endpoint(outputs=["text"])}
    edges = [Edge(REQUEST, "say")]
    narrow = Pipeline("narrow", {"text": "say"}, {"say": one}, edges, chat, limits=Limits(max_requests=4))
    tiny = Pipeline("tiny", {"text": "say"}, {"say": _say(max_model_len=CONTEXT)}, edges, chat)
    digest = Pipeline(
        "digest",
        outputs={"text": "sum", "transcript": "sum"},
        stages={"sum": Stage("function", options={"op": "sum"}, when="audio")},
        edges=[Edge(REQUEST, "sum")],
        endpoints={"chat": Endpoint(outputs=["text"]), "transcriptions": Endpoint(outputs=["transcript"])},
    )
    senses = Pipeline(
        "senses",
        outputs={"text": "sum"},
        stages={
            "look": Stage("function", when=["audio", "image", "video"]),
            "sum": Stage("function", options={"op": "sum"}),
        },
        edges=[Edge(REQUEST, "look"), Edge(REQUEST, "sum"), Edge("look", "sum", stream=False)],
        endpoints=chat,
    )
    bounds = {"multiple_of": 2, "max_edge": 64, "max_pixels": 2048, "max_steps": 50, "max_guidance": 20.0}
    pictures = Endpoint(outputs=["image"], max_n=4, **bounds)
    sketch = Pipeline(
        "sketch",
        outputs={"text": "say", "image": "picture", "video": "film"},
        stages={
            "say": _say(),
            "picture": Stage("function", options={"op": "picture"}, batch=Batch(max_num_seqs=64)),
            "frames": Stage("function", options={"op": "film"}, retry=Retry(attempts=1)),
            "film": Stage("film"),
        },
        edges=[
            *(Edge(REQUEST, stage) for stage in ("say", "picture", "frames")),
            Edge("frames", "film", stream=False),
        ],
        endpoints={
            "chat": Endpoint(outputs=["text", "image"]),
            "images": pictures,
            "edits": Endpoint(outputs=["image"], max_n=4, max_partial_images=1, **bounds),
            "videos": Endpoint(outputs=["video"], max_frames=33, fps=8.0, keep_s=1800.0, **bounds),
        },
        inputs=["image"],
    )
    return [echo, narrow, tiny, digest, senses, sketch]


WORKERS = [
    ("echo", "say"),
    ("echo", "tone"),
    ("narrow", "say"),
    ("tiny", "say"),
    ("digest", "sum"),
    ("senses", "look"),
    ("senses", "sum"),
    ("sketch", "say"),
    ("sketch", "picture"),
    ("sketch", "frames"),
    ("sketch", "film"),
]


class Stack:
    """Starts in the constructor; :meth:`stop` ends all and checks that nothing is left.

    Args:
        folder: For sockets, logs and shared memory; short, since sockets' paths are.
        gateway_options: More command line options of the gateway.
    """

    def __init__(self, folder: Path, *gateway_options: str) -> None:
        self.folder = folder
        self.shm = folder / "shm"
        self.shm.mkdir()
        self.address = f"ipc://{folder}/run"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._document = folder / "pipelines.json"
        self._document.write_bytes(msgspec.json.encode(pipelines()))
        self.start_gateway(*gateway_options)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts ``python -P -m ...`` with its output in the folder."""
        folders = {"OMNI_SHM_DIR": "shm", "OMNI_RUN_DIR": "run", "OMNI_STATE_DIR": "state"}
        env = {**os.environ, **{name: str(self.folder / sub) for name, sub in folders.items()}}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments], stdout=log, stderr=log, env=env
            )
        self.processes[name] = process
        return process

    def start_gateway(self, *options: str) -> None:
        """Starts the gateway on a free port and waits until it listens."""
        self.url = self.another_gateway("gateway", *options)
        self.port = int(self.url.rpartition(":")[2])

    def another_gateway(self, name: str, *options: str) -> str:
        """Starts a gateway beside others, and waits until it listens. Returns its URL."""
        log = self.folder / f"{name}.log"
        log.write_text("")
        self.start(name, "broker.gateway", "--port", "0", "--address", self.address, *options)
        until(lambda: "listening on" in log.read_text(), "the gateway to listen")
        return log.read_text().partition("listening on ")[2].split()[0]

    def start_broker(self) -> None:
        """Starts the broker."""
        self.start("broker", "broker.server", "--pipelines", str(self._document), "--address", self.address)

    def start_workers(self) -> None:
        """Starts a worker for each stage that somebody wants."""
        for pipeline, stage in WORKERS:
            options = ("--pipeline", pipeline, "--stage", stage, "--broker", self.address)
            self.start(f"{pipeline}-{stage}", "workers.cli", *options)

    def wait_ready(self) -> None:
        """Waits until /ready says so."""
        until(lambda: self.get("/ready")[0] == 200, "all stages to have a worker", 120)

    def get(self, path: str) -> tuple[int, bytes]:
        """A GET request's status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        """Ends one process and returns its exit code."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(60)

    def stop(self) -> None:
        """Ends everything: workers first, so that they can take their leave."""
        workers = {name: p for name, p in self.processes.items() if name not in ("broker", "gateway")}
        for process in workers.values():
            process.terminate()
        codes = {name: process.wait(60) for name, process in workers.items()}
        codes |= {name: self.end(name) for name in ("gateway", "broker") if name in self.processes}
        assert set(codes.values()) <= {0}, (codes, (self.folder / "gateway.log").read_text())
        assert not list(self.shm.iterdir()), "files are left in the shared-memory folder"


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Waits for a condition, looking at it often; fails with ``what`` after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


async def reaches(client: Client, timeout_s: float, **expected: int) -> dict[str, Any]:
    """Waits until the broker's tables have these numbers; returns the whole status."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = await client.inspect("status")
        tables: dict[str, int] = status["tables"]
        if all(tables[name] == number for name, number in expected.items()):
            return status
        assert time.monotonic() < deadline, f"{tables}, not {expected} after {timeout_s:g} s"
        await asyncio.sleep(0.01)


async def empty(client: Client, timeout_s: float = 30.0) -> None:
    """Waits until the broker holds nothing any more."""
    await reaches(client, timeout_s, requests=0, queued=0, running=0, blocks=0, holds=0)


async def engines(client: Client, pipeline: str, stage: str) -> list[int]:
    """The processes that work for a stage."""
    status = await client.inspect("status")
    return [worker["pid"] for worker in status["pipelines"][pipeline]["stages"][stage]["workers"]]


@asynccontextmanager
async def standing_still(client: Client, pipeline: str, stage: str) -> AsyncIterator[None]:
    """Nothing comes of a stage meanwhile: its engines are stopped, while their guardians beat for them.

    What needs the stage is under way for certain, however slow the machine or the test is.
    """
    pids = await engines(client, pipeline, stage)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def attempts(status: dict[str, Any], pipeline: str, stage: str) -> int:
    """How many tasks of a stage have been started so far."""
    count: int = status["pipelines"][pipeline]["stages"][stage]["tasks"]["attempts"]
    return count
