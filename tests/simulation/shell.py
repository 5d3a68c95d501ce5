"""The broker process around the core: journal before instructions, death at any moment, and coming back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from adapters.host import host_of
from broker.core.events import Discard, Event, Gone, Instruction, Lost, Reap, Received, Send, SweepRun, Tick
from broker.core.machine import Core, Settings
from broker.core.records import OfPeer, OfRequest
from broker.core.requests import Settings as RequestSettings
from broker.core.restore import restore
from broker.protocol import Assign, Beat, Grant, Message, Peer, Refused, Submit
from tests.simulation.clients import Client
from tests.simulation.flow import FlowCheck

if TYPE_CHECKING:
    from tests.simulation.world import World

LATE = 0.3  #: share of failed sends that the core hears of after the next event

_encode = msgspec.msgpack.encode
_decode_request = msgspec.msgpack.Decoder(OfRequest).decode
_decode_peer = msgspec.msgpack.Decoder(OfPeer).decode


class Journal:
    """What survives the broker, as bytes: nothing in it is shared with a core."""

    def __init__(self) -> None:
        self.requests: dict[int, list[tuple[int, bytes]]] = {}  #: request -> (position, record)
        self.peers: dict[Peer, bytes] = {}
        self._position = 0

    def write(self, core: Core) -> None:
        """Takes a core's records in."""
        batch = core.take_records()
        if not batch:
            return
        for number in batch.dropped:
            self.requests.pop(number, None)
        for number, records in batch.requests.items():
            rows = self.requests.setdefault(number, [])
            for record in records:
                self._position += 1
                rows.append((self._position, _encode(record)))
        for peer, met in batch.peers.items():
            if met is None:
                self.peers.pop(peer, None)
            else:
                self.peers[peer] = _encode(met)

    def read(self) -> tuple[dict[Peer, OfPeer], list[tuple[int, OfRequest]]]:
        """Everything, for a new core."""
        rows = sorted((at, number, row) for number, some in self.requests.items() for at, row in some)
        records = [(number, _decode_request(row)) for _, number, row in rows]
        return {peer: _decode_peer(record) for peer, record in self.peers.items()}, records


class Broker:
    """The broker, dead or alive."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.journal = Journal()
        self.boot = 0
        self.up = False
        self.core: Core
        self.flow = FlowCheck()
        self.attempts: dict[tuple[int, int], int] = {}  #: task -> its newest attempt
        self.holders: dict[tuple[int, int], Peer] = {}  #: task -> who was given that
        self._connected: set[Peer] = set()  #: peers with a connection to this process
        self._unheard: list[Peer] = []  #: a send found them gone, and the core does not know yet
        self.start()

    # --- life and death

    def start(self) -> None:
        """Its supervisor starts it, the first time or again."""
        world = self.world
        self.boot += 1
        world.memory.doubles = self.boot > 1
        limits = RequestSettings(keep_s=world.KEEP_S, detached_s=world.DETACHED_S, letters=100)
        self.core = Core(
            [world.pipeline],
            run=world.RUN,
            entropy=world.seed,
            boot=self.boot,
            first_request=self.boot << 20,  # numbers of an earlier core never come back
            store="store",
            host=world.HOST,
            journal=True,
            settings=Settings(liveness_s=world.LIVENESS_S, sweep_s=4.0, requests=limits),
        )
        self.up = True
        if self.boot > 1:
            peers, records = self.journal.read()
            restore(self.core, peers, records, world.now, lost=world.memory.seems_lost)
            for peer in peers:
                if peer not in world.processes and world.rng.random() < 0.7:
                    self.handle(Gone(world.now, peer))  # else its silence, or its guardian's, must do
            self.handle(Tick(world.now))

    def die(self) -> None:
        """SIGKILL: what was under way in either direction is lost from some point on."""
        world = self.world
        self.check_trust()
        self.up = False
        self._connected.clear()
        self._unheard.clear()
        for peer in world.up.busy():
            kept = world.kept(world.up[peer]) if peer in world.processes else 0
            world.up.lose_oldest(peer, kept)
        for peer in world.down.busy():
            world.down.lose_newest(peer, world.kept(world.down[peer]))

    def check_trust(self) -> None:
        """Nobody here sends handles of what is not his."""
        assert not self.core.board.refused["bad_handle"], "an honest peer's handle was refused"

    def knows(self, peer: Peer) -> bool:
        """Whether the peer is not given up, as far as it may know."""
        process = self.world.processes.get(peer)
        if isinstance(process, Client) and process.introducing == "gone":
            return False
        return self.core.knows(peer)

    # --- connections

    def connect(self, peer: Peer) -> None:
        """A peer's connection is there (again)."""
        self._connected.add(peer)

    def unconnected(self) -> list[Peer]:
        """Living peers without a connection."""
        return [peer for peer in self.world.processes if peer not in self._connected]

    def disconnect(self, peer: Peer) -> None:
        """The peer's process is gone, and that has been noticed."""
        self._connected.discard(peer)

    # --- events

    def receive(self, peer: Peer, message: Message) -> None:
        """A message has come."""
        self.connect(peer)
        self.world.trace("->", peer, message)
        self.handle(Received(self.world.now, peer, message))

    def handle(self, event: Event) -> None:
        """One event, its records, then its instructions; sends that fail are next, or later."""
        now = self.world.now
        todo = [event, *(Lost(now, peer) for peer in self._unheard)]
        self._unheard = []
        for one in todo:  # it grows meanwhile
            instructions = self.core.handle(one)
            self.journal.write(self.core)
            for instruction in instructions:
                peer = self._obey(instruction)
                if peer is None or not self.core.knows(peer):
                    continue
                if self.world.rng.random() < LATE:  # something else is read before the core hears of it
                    self._unheard.append(peer)
                elif Lost(now, peer) not in todo:
                    todo.append(Lost(now, peer))

    def _obey(self, instruction: Instruction) -> Peer | None:
        """Carries an instruction out. Gives the peer that it turned out not to reach."""
        memory = self.world.memory
        if type(instruction) is Send:
            return self._send(instruction.peer, instruction.message)
        if type(instruction) is Reap:
            if not host_of(instruction.arena):
                memory.reap(instruction.arena)
        elif type(instruction) is Discard:
            memory.discard(instruction.name, "")
        elif type(instruction) is SweepRun:
            memory.sweep(instruction.arenas, self.world.living_arenas())
            memory.sweep_files(set(self.core.board.names))
        return None

    def _send(self, peer: Peer, message: Message) -> Peer | None:
        assert peer[:1] in (b"g", b"w", b"c"), f"{message} is for {peer!r}, which is no peer"
        if type(message) is Assign:
            self._check_attempt(peer, message)
        elif type(message) is Grant:
            self.flow.check(self.core, message.request, message.stage, message.chunks)
        elif type(message) is Refused:
            self._note_refused(peer, message.tag)
        if peer not in self._connected:
            return peer
        if type(message) is not Beat:
            self.world.trace("<-", peer, message)
            self.world.down.put(peer, message)
        return None

    def _note_refused(self, peer: Peer, tag: int) -> None:
        """What was given goes back, also where the same submission comes a second time."""
        client = self.world.processes.get(peer)
        stream = client.streams.get(tag) if isinstance(client, Client) else None
        if stream is not None and isinstance(stream.opening, Submit):
            chunks = [chunk for given in stream.opening.given.values() for chunk in given]
            self.world.memory.given_back.update(h.block for chunk in chunks for h in chunk.handles)

    def _check_attempt(self, peer: Peer, m: Assign) -> None:
        task = (m.request, m.stage)
        assert m.attempt > self.attempts.get(task, 0), "an attempt's number was used before"
        self.attempts[task] = m.attempt
        self.holders[task] = peer
        engine = self.world.processes.get(peer)
        if engine is None or engine.doubtful:  # its death is not known yet
            self.world.blamed[task] += 1
        self.flow.check(self.core, m.request, m.stage, m.granted[0])
