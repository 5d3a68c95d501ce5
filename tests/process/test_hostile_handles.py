"""A handle that lies fails the request that brought it; the worker that was to read it lives on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adapters.handle import BlockId, Handle
from broker.client import BrokerError, Client
from broker.protocol import Submit
from tests.house import House, empty_house, line, write

BIG = 1 << 40


def lie(offset: int, generation: int, nbytes: int, shape: int) -> Handle:
    """A handle into the sender's own arena; the place is filled in when it is sent."""
    return Handle("shm", BlockId("", offset, generation), nbytes, "float32", (shape,))


LIES = [
    lie(BIG, 1, 4096, 1024),
    lie(-64, 1, 4096, 1024),
    lie(64, 99, 4096, 1024),
    lie(64, 1, BIG, BIG // 4),
    lie(64, 1, 4096, BIG),
    lie(64, 1, 4096, -1024),
]


@pytest.fixture(scope="module")
def _house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    document = line("a")
    document["stages"]["a"]["retry"] = {"attempts": 1}
    with empty_house() as home:
        home.start("--pipeline", write(tmp_path_factory.mktemp("line"), document))
        yield home


@pytest.fixture
def home(_house: House, monkeypatch: pytest.MonkeyPatch, leaves_nothing: Path) -> House:
    """One house for all lies."""
    monkeypatch.setenv("OMNI_SHM_DIR", str(_house.shm_dir))
    return _house


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_handle_costs_its_request_only(home: House, lie: Handle) -> None:
    before = home.pids("line", "a")
    async with home.client() as client:
        error = await _submit_lie(client, lie)
        assert error.error.status >= 400
        async with await client.submit(
            "line", outputs=["text"], given={"request": [{"text": "x"}]}
        ) as stream:
            assert [got async for got in stream] == [("text", {"text": "x"})]
    assert home.pids("line", "a") == before


async def _submit_lie(client: Client, lie: Handle) -> BrokerError:
    """Sends a request whose handle is in the client's own arena, so that the broker lets it pass."""
    post = client._connection.post

    def forge(message: object) -> None:
        if isinstance(message, Submit):
            (chunk,) = message.given["request"]
            honest = chunk.handles[0]
            block = BlockId(honest.block.place, lie.block.offset, lie.block.generation)
            chunk.handles[0] = msgspec.structs.replace(lie, block=block)
        post(message)  # type: ignore[arg-type]

    client._connection.post = forge  # type: ignore[method-assign]
    try:
        payload = {"x": np.zeros(8192, np.float32)}
        async with await client.submit("line", outputs=["text"], given={"request": [payload]}) as stream:
            async for _ in stream:
                pass
    except BrokerError as error:
        return error
    finally:
        client._connection.post = post  # type: ignore[method-assign]
    raise AssertionError("the lie was believed")
