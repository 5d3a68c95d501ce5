"""Killing and stopping processes of a house at random, each kind of death as often as the others."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.callers import Caller, Death
from scripts.benchmarks.house import House, Running, send

#: Pipeline/stage -> the output of a chat that does not come while the stage has no worker.
STAGES = {
    "echo/say": "text",
    "echo/tone": "audio",
    "voice/thinker": "text",
    "voice/talker": "audio",
    "voice/code2wav": "audio",
}
PAUSES_S = (0.2, 3.0)  #: how long a stopped process stays so
FOUND_S = 30.0  #: beyond its stage's time limit; a hung engine must be gone by then


class Happened(NamedTuple):
    """A death, and whom it touched."""

    death: Death
    victims: int
    touched: int


class Deaths:
    """The reaper.

    Args:
        home: Where it works.
        callers: Those whose streams are open.
        due: Whether an output ("text", "audio", "" for any) of a caller's stream is not all there yet.
        before: Awaited before the broker dies; what it counted is gone then.
        hung_s: The stages' time limit: an engine that is stopped for good is killed after it.
        seed: Of all that is random here.
    """

    def __init__(
        self,
        home: House,
        callers: Callable[[], Sequence[Caller]],
        due: Callable[[Caller, str], bool],
        before: Callable[[], Awaitable[None]],
        *,
        hung_s: float,
        seed: int,
    ) -> None:
        self._home = home
        self._callers = callers
        self._due = due
        self._before = before
        self._hung_s = hung_s
        self._random = random.Random(seed)
        self._later: list[asyncio.Task[None]] = []
        self.not_found = 0  #: engines that were stopped for good and that nobody replaced

    def deck(self, kinds: Sequence[str], number: int) -> list[str]:
        """So many kinds of death: each as often as the others, in random order."""
        dealt: list[str] = []
        while len(dealt) < number:
            dealt += self._random.sample(kinds, len(kinds))
        return dealt[:number]

    def pause(self, seconds: float) -> float:
        """A random time around this one."""
        return seconds * self._random.uniform(0.5, 1.5)

    async def strike(self, kind: str) -> Happened:
        """One death of this kind. A house that it ended is started again."""
        return await KINDS[kind](self, kind)

    async def settle(self) -> None:
        """Waits for what was stopped."""
        await asyncio.gather(*self._later)

    # --- the kinds

    async def kill_one(self, kind: str) -> Happened:
        """SIGKILL to an engine, a guardian, the broker or the gateway."""
        victim = await self._one(kind.partition(" ")[0])
        return self._record(kind, victim, [victim] if victim and send(victim.pid, signal.SIGKILL) else [])

    async def stop_one(self, kind: str) -> Happened:
        """SIGSTOP, and SIGCONT after a while."""
        victim = await self._one(kind.partition(" ")[0])
        if victim is None or not send(victim.pid, signal.SIGSTOP):
            return self._record(kind, None, [])
        self._soon(self._go_on(victim, self._random.uniform(*PAUSES_S)))
        return self._record(kind, victim, [victim])

    async def hang_engine(self, kind: str) -> Happened:
        """SIGSTOP for good: its stage's time limit must find it."""
        victim = await self._one("engine")
        if victim is None or not send(victim.pid, signal.SIGSTOP):
            return self._record(kind, None, [])
        self._soon(self._is_found(victim))
        return self._record(kind, victim, [victim])

    async def kill_stage(self, kind: str) -> Happened:
        """SIGKILL to all guardians and engines of a stage."""
        victim = await self._one("guardian")
        mates = [p for p in self._home.processes() if victim is not None and p.stage == victim.stage]
        return self._record(kind, victim, [mate for mate in mates if send(mate.pid, signal.SIGKILL)])

    async def cut(self, kind: str) -> Happened:
        """Closes connections of callers whose requests are stored."""
        open_ = [caller for caller in self._callers() if caller.streaming and caller.body.get("store")]
        some = self._random.sample(open_, self._random.randint(1, len(open_))) if open_ else []
        death = Death(kind, time.monotonic())
        hit = [caller for caller in some if caller.cut()]
        for caller in hit:
            caller.touched(death)
        return Happened(death, len(hit), len(hit))

    async def kill_everything(self, kind: str) -> Happened:
        """SIGKILL to all processes; `omni-broker start` in the same folders."""
        await self._before()
        happened = self._record(kind, None, self._home.processes())
        await self._home.kill_everything()
        await self._home.start()
        return happened

    # --- whom and what for

    async def _one(self, role: str) -> Running | None:
        if role == "broker":
            await self._before()
        fit = [p for p in self._home.processes() if p.role == role and (not p.stage or p.stage in STAGES)]
        return self._random.choice(fit) if fit else None

    def _record(self, kind: str, victim: Running | None, victims: Sequence[Running]) -> Happened:
        death = Death(kind, time.monotonic())
        stage = victim.stage if victim is not None else ""
        output = STAGES.get(stage, "")
        pipeline = stage.partition("/")[0]
        touched = [
            caller
            for caller in self._callers()
            if victims
            and caller.streaming
            and pipeline in ("", caller.body["model"])
            and self._due(caller, output)
        ]
        for caller in touched:
            caller.touched(death, output)
        return Happened(death, len(victims), len(touched))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        self._later.append(asyncio.ensure_future(work))

    async def _go_on(self, victim: Running, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if victim in self._home.processes():  # its number may be another's now
            send(victim.pid, signal.SIGCONT)

    async def _is_found(self, victim: Running) -> None:
        deadline = time.monotonic() + self._hung_s + FOUND_S
        while victim in self._home.processes():
            if time.monotonic() > deadline:
                self.not_found += 1
                send(victim.pid, signal.SIGCONT)
                return
            await asyncio.sleep(0.2)


KINDS = {
    "engine killed": Deaths.kill_one,
    "engine stopped": Deaths.stop_one,
    "engine hung": Deaths.hang_engine,
    "guardian killed": Deaths.kill_one,
    "guardian stopped": Deaths.stop_one,
    "broker killed": Deaths.kill_one,
    "broker stopped": Deaths.stop_one,
    "gateway killed": Deaths.kill_one,
    "gateway stopped": Deaths.stop_one,
    "stage killed": Deaths.kill_stage,
    "connections cut": Deaths.cut,
    "everything killed": Deaths.kill_everything,
}
