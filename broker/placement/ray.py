"""Workers on the nodes of a Ray cluster: `omni-broker start --placement ray`. A process of its own.

One actor per wanted worker holds the CPUs and GPUs that its stage asks for; which node it is on is Ray's
choice. It runs `omni-worker`, which comes back to the broker over TCP: nothing of a request goes through Ray.
An actor that is lost, with its node or without, is replaced by another. All actors end with this process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from adapters.process import describe_exit
from broker.address import is_loopback
from broker.placement.apart import USAGE
from broker.placement.demand import Demand, demand_of, device_of, trouble
from broker.placement.keeper import Keeper
from broker.placement.roster import Guardian, Post, Roster, posts
from pipelines.graph import Pipeline

log = logging.getLogger("placer")

WAITS_S = 10.0  #: a worker that has waited for a node so long is told of
FIRST_PAUSE_S = 0.2  #: between two actors of a worker that keeps failing
LONGEST_PAUSE_S = 30.0
SETTLED_S = 20.0  #: a worker that lived so long is started again at once
KNOCK_S = 5.0  #: the cluster's head opens its port within so long
CONNECT_S = 60.0  #: and takes us for a driver within so long
LONGER_S = 5.0  #: a worker that was given the time to leave is killed after so much more
DRAIN_S = 30.0  #: of all workers when this process is to end


class NoCluster(Exception):
    """There is no Ray cluster to place workers on; the message says what to do."""


class Worker:
    """One worker of a stage, and another in its place when it is lost.

    Args:
        name: What log lines call it.
        demand: What it asks of a node.
        options: Of `omni-worker`.
        drain_s: How long it may take to finish what it holds.
    """

    def __init__(self, name: str, demand: Demand, options: list[str], drain_s: float) -> None:
        self.name = name
        self.guardian: Guardian | None = None
        self.waits_since: float | None = None  #: for a node
        self._failure = ""  #: why the last one ended
        self._settles = 0.0  #: when its successor has lived long enough for that to be forgotten
        self._demand = demand
        self._options = options
        self._drain_s = drain_s
        self._leaving = False
        self._actor: Any = None
        self._task = asyncio.ensure_future(self._keep())

    @property
    def gone(self) -> bool:
        """See :class:`broker.placement.roster.Kept`."""
        return self._task.done()

    @property
    def failure(self) -> str:
        """Why it ended a short while ago; "" if it has not, or has lived well since."""
        return self._failure if time.monotonic() < self._settles else ""

    def drain(self) -> None:
        """See :class:`broker.placement.roster.Kept`."""
        if self._leaving:
            return
        self._leaving = True
        if self.guardian is None:  # it waits for a node, or for its pause to end
            self._task.cancel()
            self._end_actor()
        else:
            self._actor.drain.remote()
            asyncio.get_running_loop().call_later(2 * self._drain_s + LONGER_S, self._end_actor)

    async def left(self, patience_s: float) -> None:
        """Waits until it has left, but not for longer; then it ends at once."""
        self.drain()
        await asyncio.wait((self._task,), timeout=patience_s)
        self._task.cancel()
        self._end_actor()

    def _end_actor(self) -> None:
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None

    async def _keep(self) -> None:
        pause = 0.0
        while not self._leaving:
            began = time.monotonic()
            cause = await self._run_once()
            self.guardian, self.waits_since = None, None
            self._end_actor()
            if self._leaving:
                return
            lived = time.monotonic() - began
            pause = 0.0 if lived > SETTLED_S else min(max(FIRST_PAUSE_S, pause * 2), LONGEST_PAUSE_S)
            self._failure, self._settles = cause, time.monotonic() + pause + SETTLED_S
            when = f"in {pause:g} s" if pause else "now"
            log.warning("%s ended (%s); it is started again %s", self.name, cause, when)
            await asyncio.sleep(pause)

    async def _run_once(self) -> str:
        """One actor's life; gives the cause of its end."""
        import ray

        keeper = ray.remote(Keeper).options(
            num_cpus=self._demand.cpus, num_gpus=self._demand.gpus, max_concurrency=4, max_restarts=0
        )
        try:
            self.waits_since = time.monotonic()
            self._actor = keeper.remote(self._options, os.environ.get("OMNI_KEYS", ""))
            host, pid = await self._actor.begin.remote()
            self.guardian, self.waits_since = (host, pid), None
            log.info("%s is process %d on %s", self.name, pid, host)
            code, last = await self._actor.wait.remote()
        except ray.exceptions.RayError as error:
            return f"with its actor: {str(error).splitlines()[0]}"
        return f"on {host}: {last or describe_exit(code)}"


class Placer:
    """Keeps as many workers on the cluster as the broker wants.

    Args:
        pipelines: Whose.
        address: The broker's, for us.
        workers_address: The broker's, for workers on the nodes.
        log_level: Of the workers.
    """

    def __init__(self, pipelines: list[Pipeline], address: str, workers_address: str, log_level: str) -> None:
        self._address = address
        self._workers_address = workers_address
        self._log_level = log_level
        self._stages = posts(pipelines)
        gpus = any(node.gpus for node in nodes())
        self._demands = {post.label: demand_of(post.stage, gpus=gpus) for post in self._stages}
        self._roster: Roster[Worker] = Roster(self._stages, self._hire)

    async def run(self) -> None:
        """Until cancelled; then workers finish what they hold."""
        self._roster.begin()
        try:
            async with aclosing(self._roster.following(self._address)) as reports:
                async for asker in reports:
                    asker.tell(await self._troubles())
        finally:
            await asyncio.gather(*(worker.left(DRAIN_S) for worker in self._roster.workers()))

    def _hire(self, post: Post, place: int) -> Worker:
        demand = self._demands[post.label]
        drain_s = post.stage.retry.timeout_s
        options = ["--pipeline", post.pipeline, "--stage", post.name, "--broker", self._workers_address]
        options += ["--device", device_of(demand), "--log-level", self._log_level]
        options += ["--patience", "60", "--drain-s", str(drain_s)]
        return Worker(f"{post.label}'s worker {place}", demand, options, drain_s)

    async def _troubles(self) -> dict[str, str]:
        """Why stages lack workers, for those that have for a while."""
        found: dict[str, str] = {}
        late = time.monotonic() - WAITS_S
        for post in self._stages:
            workers = self._roster.kept(post.label).values()
            waiting = sum(one.waits_since is not None and one.waits_since < late for one in workers)
            failures = [one.failure for one in workers if one.failure]
            if waiting:
                there = await asyncio.to_thread(nodes)
                found[post.label] = trouble(waiting, self._demands[post.label], there)
            elif failures:
                found[post.label] = f"a worker ended {failures[0]}"
        return found


def nodes() -> list[Demand]:
    """What each living node has."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Demand(resources.get("CPU", 0.0), resources.get("GPU", 0.0)) for resources in alive]


def connect(ray_address: str) -> None:
    """Makes this process a driver of a running cluster. Raises NoCluster; ends the process after CONNECT_S.

    Ray itself waits for minutes where nobody answers, in code that can't be interrupted.
    """
    import ray

    if ray_address != "auto":
        _knock(ray_address)
    late = threading.Timer(CONNECT_S, _too_late, (ray_address,))
    late.daemon = True
    late.start()
    try:
        ray.init(
            address=ray_address,
            namespace="omni-broker",
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise _no_cluster(ray_address, str(error).strip() or type(error).__name__) from None
    finally:
        late.cancel()


def _knock(ray_address: str) -> None:
    """Raises NoCluster where nobody listens."""
    try:
        parts = urlsplit(f"//{ray_address}")
        socket.create_connection((parts.hostname or "", parts.port or 0), KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(ray_address, str(error)) from None


def _no_cluster(ray_address: str, reason: str) -> NoCluster:
    return NoCluster(
        f"no Ray cluster at {ray_address} ({reason.splitlines()[0]}); start one with `ray start --head`, or "
        "join it on this machine, and name its address with --ray-address"
    )


def _too_late(ray_address: str) -> None:
    log.error("%s", _no_cluster(ray_address, f"no answer within {CONNECT_S:g} s"))
    logging.shutdown()
    os._exit(USAGE)


def reachable(listen: str) -> str:
    """The address at which nodes find the broker that listens there; says so where they can't."""
    import ray

    parts = urlsplit(listen)
    host, own = parts.hostname or "", ray.util.get_node_ip_address()
    if host in ("0.0.0.0", "::"):
        return f"tcp://{f'[{own}]' if ':' in own else own}:{parts.port}"
    others = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} - {own}
    if is_loopback(host) and others:
        log.warning("the broker listens at %s only, which nodes at %s can't reach", listen, ", ".join(others))
    return listen


async def place(placer: Placer) -> None:
    """Runs a placer until SIGTERM or SIGINT."""
    task = asyncio.ensure_future(placer.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


def main() -> None:
    """``python -P -m broker.placement.ray``, started by the supervisor."""
    parser = argparse.ArgumentParser(prog="broker.placement.ray", description="Places workers on Ray.")
    parser.add_argument("--pipelines", type=Path, required=True, help="JSON file with a list of pipelines")
    parser.add_argument("--address", required=True, help="the broker's, for this process")
    parser.add_argument("--listen", required=True, help="where the broker listens for workers")
    parser.add_argument("--ray-address", default="auto", help="auto, or host:port of the cluster's head")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(message)s", stream=sys.stderr)
    pipelines = msgspec.json.decode(arguments.pipelines.read_bytes(), type=list[Pipeline])
    try:
        connect(arguments.ray_address)
    except NoCluster as error:
        log.error("%s", error)
        sys.exit(USAGE)
    listen = reachable(arguments.listen)
    placer = Placer(pipelines, arguments.address, listen, arguments.log_level)
    asyncio.run(place(placer))


if __name__ == "__main__":
    main()
