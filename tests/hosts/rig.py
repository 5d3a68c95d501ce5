"""Pipelines of sine tones for several hosts, clusters that serve them, requests that know what must come."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from adapters.chunk import Payload
from broker.client import Client
from scripts.benchmarks.hosts import Cluster, Host, cluster
from scripts.benchmarks.lan import missing

Wave = npt.NDArray[np.float32]

HERTZ = 440.0
RATE, WORD_S = 24_000, 1.0  #: a chunk of 94 KiB: too much to ride inside a message
BIG_RATE, BIG_WORD_S = 192_000, 10.0  #: one of 7.3 MiB
START_S = PATIENCE_S = 180.0  #: seconds are enough on an idle machine; on a busy one it may take minutes


@contextmanager
def running(
    folder: Path,
    hosts: int,
    pipelines: Sequence[dict[str, Any] | str],
    workers: Mapping[int, Sequence[str]],
    start_s: float = START_S,
) -> Iterator[Cluster]:
    """A cluster that serves pipelines (documents, or names of some that ship) with these workers.

    In the end nothing of it may be left on any host. Skips where a machine has no network namespaces.
    """
    if why := missing():
        pytest.skip(why)
    options: list[str] = []
    for pipeline in pipelines:
        if isinstance(pipeline, dict):
            file = folder / f"{pipeline['name']}.yaml"
            file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
            pipeline = str(file)  # noqa: PLW2901
        options += ["--pipeline", pipeline]
    with cluster(hosts) as made:
        made.start(*options)
        made.place(workers, start_s)
        yield made
        leaks = made.stop()
        assert sum(leaks) == 0, (leaks, [(h.segments(), h.files()) for h in made.hosts], made.log)
        assert "Traceback" not in made.log, made.log


def sit_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients in the test's own process see this host's memory, and have its keys."""
    for name in ("OMNI_SHM_DIR", "OMNI_KEYS"):
        monkeypatch.setenv(name, host.env[name])


def has(transport: str) -> bool:
    """Whether a transport can be tried here."""
    return transport != "ucx" or importlib.util.find_spec("ucxx") is not None


def came_by(host: Host) -> dict[str, int]:
    """Way -> blocks that have come so from other hosts, as the engines say that have left this one."""
    blocks: Counter[str] = Counter()
    for line in re.findall(r"blocks that came from other hosts: (.*)", host.log):
        for number, way in re.findall(r"(\d+) by (\w+) \(", line):
            blocks[way] += int(number)
    return blocks


def document(name: str, *, big: bool = False, **edge: Any) -> dict[str, Any]:
    """`tone` sings a chunk a word, `mix` hands each on and `sum` adds them up; ``edge``: settings between.

    `mix` alone is output where chunks are small, `sum` alone where they are big.
    """
    rate, word_s, last = (BIG_RATE, BIG_WORD_S, "sum") if big else (RATE, WORD_S, "mix")
    tone = {"op": "tone", "sample_rate": rate, "word_s": word_s, "frequency_hz": HERTZ}
    batch = {"max_num_seqs": 16}
    return {
        "name": name,
        "outputs": {"text" if big else "audio": last},
        "stages": {
            "tone": {"engine": "function", "options": tone, "batch": batch},
            last: {"engine": "function", "options": {"op": "sum" if big else "pass"}, "batch": batch},
        },
        "edges": [{"from": "request", "to": "tone"}, {"from": "tone", "to": last, **edge}],
    }


def sung(number: int, *, big: bool = False) -> Wave:
    """The chunk that `tone` sings for its n-th word."""
    rate, word_s = (BIG_RATE, BIG_WORD_S) if big else (RATE, WORD_S)
    length = round(word_s * rate)
    time = np.arange(number * length, (number + 1) * length) / rate
    return (0.5 * np.sin(2 * np.pi * HERTZ * time)).astype(np.float32)


def words(number: int) -> list[Payload]:
    """What a request for so many words is given."""
    return [{"text": " ".join(["la"] * number)}]


class Song:
    """One request for tones, read as it comes. ``chunks`` grows; :meth:`whole` is awaited for the rest."""

    def __init__(self, client: Client, pipeline: str, number: int, **params: Any) -> None:
        self.chunks: list[Wave] = []
        self.attempts: dict[str, int] = {}  #: stage -> how many it took
        self._client = client
        self._pipeline = pipeline
        self._number = number
        self._reading = asyncio.ensure_future(self._read(params))

    async def _read(self, params: dict[str, Any]) -> None:
        given = {"request": words(self._number)}
        opening = self._client.submit(self._pipeline, outputs=["audio"], given=given, params=params)
        async with await opening as stream:
            async for _, payload in stream:
                self.chunks.append(np.array(payload["audio"]))
                del payload  # with it the view, which pins a block
            self.attempts = {timing.stage: timing.attempts for timing in stream.timings}

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._reading.done()

    async def at(self, chunks: int, timeout_s: float = PATIENCE_S) -> None:
        """Waits until so many chunks are here."""
        await until(lambda: len(self.chunks) >= chunks or self.ended, timeout_s)

    async def whole(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits for the end. Every chunk must have come once, in order and unchanged. Raises BrokerError."""
        async with asyncio.timeout(timeout_s):
            await self._reading
        assert len(self.chunks) == self._number
        for number, chunk in enumerate(self.chunks):
            assert np.array_equal(chunk, sung(number)), f"chunk {number}"


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Waits for a condition that is looked at in a thread: some of them ask the broker."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)
