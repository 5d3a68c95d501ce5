"""`omni-broker dead-letters`: what has failed for good is kept, shown, run again or thrown away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerError
from tests.house import House, line, write

ROOT = Path(__file__).parents[2]
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "one two three"}]}


async def fail(home: House, name: str, **params: Any) -> None:
    """One request of this name that fails in `tone`."""
    await fails(home, name, "echo", "audio", {"tone": params})


async def fails(home: House, name: str, pipeline: str, output: str, params: dict[str, Any]) -> None:
    """One request of this name that fails."""
    given = {"request": [SAID]}
    async with home.client() as client:
        stream = await client.submit(pipeline, outputs=[output], given=given, params=params, name=name)
        async with stream:
            with pytest.raises(BrokerError):
                async for _ in stream:
                    pass


async def test_an_exhausted_request_is_listed_and_shown_with_its_cause_until_it_is_dropped(
    echo: House,
) -> None:
    echo.command("dead-letters", "drop", "all")  # other tests' are none of ours
    await fail(echo, "first-letter", **{"raise": "no such luck"})
    await fail(echo, "second-letter", exit=3)
    listed = echo.command("dead-letters")
    assert listed.returncode == 0
    first, second = [row for row in listed.stdout.splitlines() if "-letter" in row]
    assert first.split()[:4] == ["first-letter", "echo", "tone", "3"]
    assert "no such luck" in first
    assert second.split()[:4] == ["second-letter", "echo", "tone", "3"]
    assert "exit code 3" in second
    shown = json.loads(echo.command("dead-letters", "show", "first-letter").stdout)
    assert shown["params"] == {"tone": {"raise": "no such luck"}}
    assert shown["outputs"] == ["audio"]
    assert list(shown["given"]) == ["request"]
    assert echo.command("dead-letters", "drop", "first-letter").stdout == "dropped 1 dead letter\n"
    assert echo.command("dead-letters", "drop", "all").stdout == "dropped 1 dead letter\n"
    assert echo.command("dead-letters", "list").stdout == "no dead letters\n"


async def test_a_retry_that_fails_is_a_letter_again(echo: House) -> None:
    await fail(echo, "third-letter", **{"raise": True, "at": 1})
    retried = echo.command("dead-letters", "retry", "third-letter")
    assert retried.returncode == 1
    assert "raised on demand" in retried.stderr
    assert "third-letter" in echo.command("dead-letters").stdout
    assert echo.command("dead-letters", "drop", "third-letter").returncode == 0


async def test_a_retry_after_the_cause_is_gone_ends_well_and_its_caller_can_have_the_rest(
    house: Callable[..., House], tmp_path: Path
) -> None:
    """The engine gives nothing before a file is there, so that each of its deaths is its task's."""
    document, gate = line("a"), tmp_path / "gate"
    document["stages"]["a"] = {"engine": "tests.process.gated_engine:GatedEngine"}
    home = house(env={"PYTHONPATH": str(ROOT)})
    home.start("--pipeline", write(tmp_path, document))

    async def kill_its_workers() -> None:
        for _ in range(3):
            await asyncio.to_thread(home.until, lambda: home.stage("line", "a")["running"])
            (pid,) = home.pids("line", "a")
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(home.until, lambda dead=pid: dead not in home.pids("line", "a"))

    killer = asyncio.create_task(kill_its_workers())
    await fails(home, "fourth-letter", "line", "text", {"a": {"gate": str(gate)}})
    await killer
    assert "signal SIGKILL" in home.command("dead-letters").stdout
    gate.touch()
    await asyncio.to_thread(home.until, home.is_ready)
    retried = home.command("dead-letters", "retry", "fourth-letter")
    assert retried.returncode == 0, retried.stderr
    assert retried.stdout.startswith("fourth-letter is done after")
    assert retried.stdout.endswith("chunks: 3 of text\n")
    assert "fourth-letter" not in home.command("dead-letters").stdout
    async with home.client() as client:
        stream = await client.attach("fourth-letter", {"text": 1})
        assert len([output async for output, _ in stream]) == 2
        stream.abort()  # it was kept for its caller; now it has it


@pytest.mark.parametrize("act", ["show", "retry", "drop"])
def test_a_name_that_is_no_letter_is_refused_in_one_line(echo: House, act: str) -> None:
    result = echo.command("dead-letters", act, "no-such-letter")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "omni-broker: no dead letter 'no-such-letter'\n"


async def test_what_the_caller_did_wrong_is_no_dead_letter(echo: House) -> None:
    await fail(echo, "callers-fault", speed=100)
    assert echo.command("dead-letters").stdout == "no dead letters\n"
