"""Workers on the nodes of a Ray cluster: placed, lost with their node, back on another one."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.ports import free_port
from tests.house import House, line, write
from tests.placement.cluster import START_S, Cluster, cluster

Houses = Callable[..., House]

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
PIECES = 16


def document() -> dict[str, Any]:
    """`a`, which takes 0.2 s a chunk, then `b`; `c`, which no node can hold; `d`, which often rests."""
    made = line("a", "b")
    made["stages"]["a"]["options"]["delay_s"] = 0.2
    made["stages"]["c"] = {"engine": "function", "resources": {"threads": 99}}
    rests = {"replicas": {"min": 0, "max": 1}, "scaling": {"down_s": 1, "cooldown_s": 1}}
    made["stages"]["d"] = {"engine": "function", "resources": rests}
    made["outputs"] |= {"more": "c", "rest": "d"}
    made["edges"] += [{"from": "b", "to": "c"}, {"from": "a", "to": "d"}]
    made["limits"] = {"ahead_chunks": 4}  # so `a` has not done all before its node is lost
    return made


def listen() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def present(home: House, *stages: str) -> bool:
    return all(home.pids("line", stage) for stage in stages)


@needs_ray
async def test_a_lost_nodes_workers_come_back_on_another_and_requests_go_on(
    house: Houses, tmp_path: Path
) -> None:
    home = house()
    with cluster(home) as ray:
        ray.add("one", 3)
        where = ("--placement", "ray", "--ray-address", ray.address, "--listen", listen())
        home.start("--pipeline", write(tmp_path, document()), *where, ready=False)
        await asyncio.to_thread(ray.add, "two", 3)
        await asyncio.to_thread(home.until, lambda: home.get("/ready")[0] == 503, START_S)
        await asyncio.to_thread(home.until, lambda: present(home, "a", "b"), START_S)
        await lose_a_node(home, ray)
        await wake_and_rest(home)
        words = await asyncio.to_thread(trouble, home)
        assert words.startswith("1 worker can't be placed: each asks for 99 CPUs, and no node has so much; ")
        assert words.endswith("they have 0 CPUs, 3 CPUs")
        stop = await asyncio.to_thread(home.command, "stop")
        assert stop.returncode == 0, home.log
        home.until(lambda: not [told for told in home.processes().values() if "workers.cli" in told])


async def lose_a_node(home: House, ray: Cluster) -> None:
    """In the middle of a request, whose chunks all come, once each."""
    worker = home.stage("line", "a")["workers"][0]
    lost = ray.node_of(worker["pid"])
    assert ray.node_of(worker["guardian"]) == lost
    given = {"request": [{"text": f"{number}"} for number in range(PIECES)]}
    got = []
    async with home.client() as client:
        stream = await client.submit("line", outputs=["text"], given=given)
        async for _, payload in stream:
            got.append(payload["text"])
            if len(got) == 2:
                ray.lose(lost)
    assert got == [f"{number}" for number in range(PIECES)]
    assert home.stage("line", "a")["tasks"]["redelivered"] == 1
    for stage in ("a", "b"):
        (pid,) = home.pids("line", stage)
        assert ray.node_of(pid) != lost


async def wake_and_rest(home: House) -> None:
    """A stage without a worker gets an actor when something waits for it, which leaves afterwards."""
    assert not present(home, "d")
    async with home.client() as client:
        given = {"request": [{"text": "x"}]}
        async with await client.submit("line", outputs=["rest"], given=given) as stream:
            async with asyncio.timeout(START_S):
                assert [payload["text"] async for _, payload in stream] == ["x"]
    await asyncio.to_thread(
        home.until, lambda: not home.stage("line", "d")["starting"] and not present(home, "d")
    )
    assert home.stage("line", "d")["tasks"]["deaths"] == 0
    assert "line/d's worker 0 ended" not in home.log


def trouble(home: House) -> str:
    """What status says of `c`, once it says something."""
    words: list[str] = []

    def told() -> bool:
        words[:] = [home.stage("line", "c")["replicas"]["trouble"]]
        return bool(words[0])

    home.until(told)
    return words[0]


@needs_ray
def test_a_start_without_a_cluster_names_the_cure(house: Houses) -> None:
    home = house()
    where = ("--placement", "ray", "--ray-address", f"127.0.0.1:{free_port()}", "--listen", listen())
    result = home.command("start", "--pipeline", "echo", "--port", "0", *where)
    assert result.returncode == 2
    (says,) = [text for text in result.stderr.splitlines() if text.startswith("no Ray cluster at 127.0.0.1:")]
    assert "start one with `ray start --head`" in says


@needs_ray
def test_workers_need_an_address_to_come_back_to(house: Houses) -> None:
    result = house().command("start", "--pipeline", "echo", "--placement", "ray")
    assert result.returncode == 2
    assert "--placement ray needs --listen" in result.stderr


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from broker.address import AddressError
    from broker.commands.doors import check_ray

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AddressError, match=r"pip install 'omni-broker\[ray\]'"):
        check_ray("tcp://127.0.0.1:5555")


def test_a_placement_that_is_none_lists_those_that_are(house: Houses) -> None:
    result = house().command("start", "--placement", "moon")
    assert result.returncode == 2
    assert "one of local, ray" in result.stderr
