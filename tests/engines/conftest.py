"""Real engines, one of each for all tests of a module; these run on its event loop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.engines.helpers import stage, started
from workers.engines.vits_acoustic import VitsAcousticEngine
from workers.engines.vits_decoder import VitsDecoderEngine
from workers.engines.whisper import WhisperEngine

VOICE = "piper-en-us-joe"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acoustic() -> AsyncIterator[VitsAcousticEngine]:
    one_thread = {"model": VOICE, "resources": {"threads": 1}}
    async with started(VitsAcousticEngine(stage("vits-acoustic", **one_thread), device="cpu")) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder() -> AsyncIterator[VitsDecoderEngine]:
    settings = {"model": VOICE, "resources": {"threads": 1}, "batch": {"max_batch_size": 8, "wait_ms": 20}}
    async with started(VitsDecoderEngine(stage("vits-decoder", **settings), device="cpu")) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whisper() -> AsyncIterator[WhisperEngine]:
    settings = {"model": "whisper-base", "resources": {"threads": 2}}
    async with started(WhisperEngine(stage("whisper", **settings), device="cpu")) as engine:
        yield engine


@pytest.fixture(scope="module", autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    """vLLM preloads its OpenMP library into all later children by way of the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
