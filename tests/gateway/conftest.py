"""One stack for all tests of this folder, and clients for each."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from tests.gateway.stack import Stack, empty


@pytest.fixture(scope="package", autouse=True)
def _quick_leak_checks() -> Iterator[None]:
    """Libraries' objects are no garbage: each test's search for leaks need not look at them again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """A running stack."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        stack = Stack(Path(folder), "--stall-s", "2", "--max-audio-mb", "1", "--max-body-mb", "2")
        try:
            stack.start_broker()
            stack.start_workers()
            stack.wait_ready()
            yield stack
        finally:
            stack.stop()


@pytest.fixture
async def broker(stack: Stack) -> AsyncIterator[Client]:
    """A client that looks into the broker; whatever the test did, nothing of it may stay."""
    async with Client(stack.address, kind="api") as client:
        yield client
        await empty(client)


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client with the gateway as base."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(stack.url, timeout=timeout) as session:
        yield session


@pytest.fixture
async def openai(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """The official client, unmodified."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
