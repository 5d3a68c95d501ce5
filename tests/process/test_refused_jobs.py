"""What jobs that fail have looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.client import BrokerError, Client
from tests.house import House, line, write

ROOT = Path(__file__).parents[2]
JOBS = 20


async def test_a_job_that_fails_lets_its_tensors_go_at_once(
    house: Callable[..., House], tmp_path: Path
) -> None:
    """Python's collector would come by too late: an error and its frames are a cycle of few objects."""
    document = line("a", "b")
    document["stages"]["b"] = {"engine": "tests.process.refusing_engine:RefusingEngine"}
    home = house(env={"PYTHONPATH": str(ROOT)})
    home.start("--pipeline", write(tmp_path, document))
    given: dict[str, list[dict[str, Any]]] = {"request": [{"x": np.zeros(100_000)}]}

    async def ask(client: Client) -> None:
        async with await client.submit("line", outputs=["text"], given=given) as stream:
            async for _ in stream:
                pass

    async with home.client() as client:
        for _ in range(JOBS):
            with pytest.raises(BrokerError, match="no"):
                await ask(client)
        held = lambda: home.status()["tables"]["holds"]  # noqa: E731
        await asyncio.to_thread(home.until, lambda: held() == 0, 30.0)
