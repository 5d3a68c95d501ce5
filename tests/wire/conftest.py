"""A broker process by itself, on ipc and on TCP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.client import Client
from scripts.ports import free_port
from tests.core.driver import line


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address to bind."""
    return f"ipc://{tmp_path}/run" if request.param == "ipc" else f"tcp://127.0.0.1:{free_port(2)}"


async def _until_it_answers(address: str) -> None:
    client = Client(address)
    await client.connect(60)
    await client.close()


@pytest.fixture
def broker(address: str, tmp_path: Path) -> Iterator[str]:
    """A running broker process that serves one two-stage pipeline; gives its address."""
    (tmp_path / "shm").mkdir()
    document = tmp_path / "pipelines.json"
    document.write_bytes(msgspec.json.encode([line("a", "b")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "broker.server", "--pipelines", str(document), "--address", address],
        env={**os.environ, "OMNI_SHM_DIR": str(tmp_path / "shm")},
    )
    asyncio.run(_until_it_answers(address))
    yield address
    assert process.poll() is None, "the broker has died"
    process.terminate()
    assert process.wait(60) == 0
    assert not list((tmp_path / "shm").iterdir()), "it left files in the shared-memory folder"
