"""What happens in a world besides messages: mishaps, recoveries, work, and time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from broker.core.events import Lost, Tick
from broker.protocol import Abort, Bye, Peer
from tests.simulation.calls import Call
from tests.simulation.clients import Client
from tests.simulation.engines import Engine
from tests.simulation.graphs import pick
from tests.simulation.guardians import Guardian
from tests.simulation.peers import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

P = TypeVar("P", bound=Process)
LONGEST_STOP_S = 14.0
SLOWEST_S = 1.0  #: a message takes no longer than that and one step of time
CALLS = 0.07  #: how likely a new request is in one step
LONGEST_RUN = 4  #: steps that a process makes at once, at most
PATIENCE_S = 60.0  #: more than any time limit in the world


class Life:
    """Decides what happens next."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.vacancies: deque[str] = deque()  #: dead guardians' stages and dead clients' kinds
        self.stopped: dict[Peer, float] = {}  #: until when
        self.unnoticed: list[Peer] = []  #: dead, but the broker's socket does not know
        self._quiet_s = 0.0
        self._calm = False
        self._mishaps = {
            "abort": self._abort,
            "kill_engine": self._kill_engine,
            "drain": self._drain,
            "kill_guardian": lambda: self._kill(Guardian),
            "stop_guardian": lambda: self._stop(Guardian),
            "kill_client": lambda: self._kill(Client),
            "stop_client": lambda: self._stop(Client),
            "leave_client": self._leave,
            "take_over": self._take_over,
            "cut": self._cut,
            "kill_broker": self._kill_broker,
            "kill_host": self._kill_host,
            "letters": self._letters,
            "more": self._more,
        }

    def begin(self) -> None:
        """The first processes."""
        world = self.world
        for stage in world.order:
            for _ in range(1 + pick(self.rng, 3)):
                self._start(stage)
        for kind in ("gateway", self.rng.choice(["gateway", "api"])):
            self._start(kind)

    def _start(self, what: str, host: str | None = None) -> None:
        world = self.world
        process: Process
        if what in ("gateway", "api"):
            process = Client(world, world.new_peer(b"c"), what)
        else:
            if host is None:
                host = world.hosts[int(world.new_peer(b"")) % len(world.hosts)]
                if self._calm:
                    host = self._deserted() or host
            process = Guardian(world, world.new_peer(b"g"), what, host)
        world.processes[process.peer] = process

    def _deserted(self) -> str:
        """A host without a guardian, but the broker's: nothing there would ever go. "": none."""
        there = {guardian.host for guardian in self.of(Guardian)}
        return next((host for host in self.world.hosts if host and host not in there), "")

    def of(self, kind: type[P]) -> list[P]:
        """The living processes of a kind."""
        return [p for p in self.world.processes.values() if isinstance(p, kind)]

    def _someone(self, kind: type[P]) -> P | None:
        some = self.of(kind)
        return some[pick(self.rng, len(some))] if some else None

    # --- mishaps

    def mishap(self) -> None:
        """A call, or something that goes wrong, or nothing."""
        chance = self.rng.random()
        if chance < CALLS:
            self._call()
            return
        chance -= CALLS
        for name, rate in self.world.faults.rates:
            if chance < rate:
                self._mishaps[name]()
                return
            chance -= rate

    def _call(self) -> None:
        client, world, rng = self._someone(Client), self.world, self.rng
        if client is None or not client.arena or client.peer in self.stopped:
            return
        name = f"call-{len(world.calls):04d}"
        outputs = rng.sample(sorted(world.pipeline.outputs), 1 + pick(rng, len(world.pipeline.outputs)))
        deadline_s = rng.uniform(0.5, 15.0) if rng.random() < 0.15 else None
        call = world.calls[name] = Call(
            world,
            name,
            outputs,
            kind=client.kind,
            stored=rng.random() < 0.2,
            deadline=deadline_s is not None,
        )
        client.submit(
            rng,
            call,
            seed=pick(rng, 1 << 30),
            priority=pick(rng, 3),
            tenant=str(pick(rng, 3)),
            deadline_s=deadline_s,
        )

    def _abort(self) -> None:
        client = self._someone(Client)
        if client is None or client.peer in self.stopped or client.introducing:
            return
        streams = [s for s in client.streams.values() if s.call.stream is s and not s.ended]
        if streams:
            stream = streams[pick(self.rng, len(streams))]
            call = stream.call
            leave = call.stored and self.rng.random() < 0.5
            client.close(stream.opening.tag, Abort(stream.opening.tag, leave))
            call.forgotten = not leave
            call.stream = None
            call.given_up = not leave
            call.leave(self.world.now)

    def _kill_engine(self) -> None:
        engine = self._someone(Engine)
        if engine is not None:
            self.world.kill(engine)  # its guardian will notice

    def _drain(self) -> None:
        engine = self._someone(Engine)
        if engine is not None and not engine.draining:
            engine.drain()

    def _kill(self, kind: type[Guardian] | type[Client]) -> None:
        process = self._someone(kind)
        if process is not None:
            self._bury(process)

    def _bury(self, process: Guardian | Client) -> None:
        """It dies, and its supervisor will start another."""
        self.world.kill(process)
        if isinstance(process, Guardian):
            self.vacancies.append(process.stage)
            return
        self.vacancies.append(process.kind)
        for stream in process.streams.values():
            stream.call.leave(self.world.now)
            if stream.call.stream is stream:
                stream.call.stream = None

    def _stop(self, kind: type[Guardian] | type[Client]) -> None:
        """SIGSTOP, for a while."""
        process = self._someone(kind)
        if process is not None and process.peer not in self.stopped:
            self.stopped[process.peer] = self.world.now + self.rng.uniform(0.1, LONGEST_STOP_S)
            self._suspect(process)
            if isinstance(process, Guardian) and process.engine is not None:
                self.world.blame_engine(process.engine.peer)

    def _suspect(self, process: Process) -> None:
        """From now on the broker may rightly take it for dead."""
        process.suspected = self.world.now
        if isinstance(process, Client):
            for stream in process.streams.values():
                stream.call.leave(self.world.now)

    def _leave(self) -> None:
        """A client says goodbye; nobody comes back for what is not stored."""
        client = self._someone(Client)
        if client is None or client.peer in self.stopped or client.introducing:
            return
        for tag, stream in list(client.streams.items()):
            client.close(tag, Abort(tag, leave=True))
            stream.call.forgotten = stream.call.forgotten or not stream.call.stored
            stream.call.leave(self.world.now)
            if stream.call.stream is stream:
                stream.call.stream = None
                stream.call.given_up = not stream.call.stored
        client.send(Bye())
        self.world.leave(client)
        self.vacancies.append(client.kind)

    def _take_over(self) -> None:
        """A user comes for a call that another process carries."""
        client = self._someone(Client)
        calls = [c for c in self.world.calls.values() if c.open and c.sure and c.stream is not None]
        if client is not None and calls and client.arena and client.peer not in self.stopped:
            client.attach(calls[pick(self.rng, len(calls))])

    def _cut(self) -> None:
        """A connection breaks though both ends live, and the broker notices."""
        process = self._someone(Process)
        world = self.world
        if process is None or not world.broker.up:
            return
        self._suspect(process)
        engine = process.engine if isinstance(process, Guardian) else process
        if isinstance(engine, Engine):
            world.blame_engine(engine.peer)
        world.up.lose_oldest(process.peer, world.kept(world.up[process.peer]))
        world.down.lose_newest(process.peer, world.kept(world.down[process.peer]))
        world.broker.handle(Lost(world.now, process.peer))

    def _kill_broker(self) -> None:
        if self.world.broker.up:
            self.world.trace("xx", b"broker", "dies")
            self.world.broker.die()

    def _kill_host(self) -> None:
        """Everything on the broker's dies; the disk stays, and so do workers elsewhere."""
        world = self.world
        world.trace("xx", b"host", "dies")
        if world.broker.up:
            world.broker.die()
        for process in [p for p in world.processes.values() if isinstance(p, Guardian | Client)]:
            if isinstance(process, Client) or not process.host:
                self._bury(process)
        world.memory.lose_all()
        for peer in world.up.busy():
            if peer not in world.processes:
                world.up.lose_newest(peer, 0)

    def _letters(self) -> None:
        client = self._someone(Client)
        if client is not None and client.arena and client.peer not in self.stopped:
            failed = [c.name for c in self.world.calls.values() if c.status == "failed"]
            client.letters(self.rng, self.rng.choice(failed) if failed else "none")

    def _more(self) -> None:
        """Another worker for some stage."""
        if len(self.of(Guardian)) < 4 * len(self.world.order):
            self._start(self.rng.choice(self.world.order))

    # --- recoveries

    def recover(self) -> None:
        """Something that is missing comes back."""
        world, rng = self.world, self.rng
        if not world.broker.up:
            if rng.random() < 0.7:
                world.broker.start()
            return
        if unconnected := world.broker.unconnected():
            world.broker.connect(unconnected[pick(rng, len(unconnected))])
        if self.vacancies:
            self._start(self.vacancies.popleft())
        for guardian in self.of(Guardian):
            if guardian.peer in self.stopped:
                continue
            if guardian.engine is not None and not guardian.engine.alive:
                guardian.engine_died("signal SIGKILL")
            elif guardian.engine is not None and guardian.engine.done:
                guardian.kill_engine("exit code 0")
            elif not guardian.welcomed and world.now > guardian.impatient:
                self._bury(guardian)
            elif guardian.engine is None and guardian.welcomed and rng.random() < 0.7:
                guardian.start_engine()
        self._come_back()

    def waiting(self) -> list[Call]:
        """Calls whose client has died, but not their user."""
        return [call for call in self.world.calls.values() if call.open and call.stream is None]

    def _come_back(self) -> None:
        """A user whose client died comes to another one."""
        calls = self.waiting()
        clients = [c for c in self.of(Client) if c.arena and c.peer not in self.stopped]
        if calls and clients:
            call = calls[pick(self.rng, len(calls))]
            if not call.sure or self.rng.random() < 0.2:
                call.given_up = True  # this one does not come back
            else:
                clients[pick(self.rng, len(clients))].attach(call)

    def make_peace(self) -> None:
        """From now on nothing dies, and who is missing comes back."""
        self._calm = True
        for peer in list(self.stopped):
            self._go_on(peer)
        world = self.world
        for stage in world.order:
            if not any(g.stage == stage for g in self.of(Guardian)) and stage not in self.vacancies:
                self.vacancies.append(stage)
        while host := self._deserted():
            self._start(world.order[0], host)
        if not world.broker.up:
            world.broker.start()

    # --- work and time

    def work(self) -> None:
        """Some process moves on, if it can."""
        workers = [process for process in self.world.processes.values() if process.has_work]
        if workers:
            worker = workers[pick(self.rng, len(workers))]
            for _ in range(1 + pick(self.rng, LONGEST_RUN)):
                if worker.peer not in self.stopped and worker.has_work:
                    worker.step(self.rng)

    def can_work(self) -> bool:
        """Whether some process can move on by itself."""
        processes = self.world.processes.values()
        return any(p.has_work and p.peer not in self.stopped and p.can_step() for p in processes)

    def pass_time(self) -> None:
        """Mostly a little, sometimes much."""
        self._pass(self.rng.random() * (0.1 if self.rng.random() < 0.9 or self._calm else 3.0))

    def _pass(self, seconds: float) -> None:
        world = self.world
        world.now += seconds
        for peer, until in list(self.stopped.items()):
            if until <= world.now:
                self._go_on(peer)
        for peer in self.unnoticed:
            world.broker.disconnect(peer)
        self.unnoticed.clear()
        for process in list(self.world.processes.values()):
            if isinstance(process, Guardian | Client) and process.peer not in self.stopped:
                if not world.up[process.peer]:
                    process.heard = world.now
                process.say_beat()
                late = seconds > SLOWEST_S / 2 or world.now - process.heard > SLOWEST_S
                if late and world.broker.up:
                    self._hurry(process)
        if world.broker.up:
            world.broker.handle(Tick(world.now))

    def _hurry(self, process: Process) -> None:
        """No link is so slow that a living process is taken for dead."""
        world = self.world
        while world.up[process.peer]:
            world.broker.receive(process.peer, world.up.take_from(process.peer))
        while world.down[process.peer] and process.alive:
            process.on(world.down.take_from(process.peer))
        process.heard = world.now

    def _go_on(self, peer: Peer) -> None:
        """SIGCONT."""
        del self.stopped[peer]

    def let_time_pass(self) -> bool:
        """In peace, when nothing moves: the clock does. False: it has done so in vain for long."""
        core = self.world.broker.core
        holds = any(worker.tasks or worker.strays for worker in core.workers.values())
        strangers = any(not self.world.broker.knows(p.peer) for p in (*self.of(Guardian), *self.of(Client)))
        waits = bool(core.board.requests or core.awaited or core.board.blocks.in_limbo or holds or strangers)
        waits = waits or self.world.leftovers()
        if len(core.requests.letters) and not any(call.open for call in self.world.calls.values()):
            self.of(Client)[0].drop_letters()
        self._pass(1.0)
        self.recover()
        self._quiet_s = 0.0 if self.world.moves() else self._quiet_s + 1.0
        return self._quiet_s < (PATIENCE_S if waits else self.world.LIVENESS_S + 2.0)
