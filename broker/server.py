"""The broker process: two ROUTER sockets, one core.

Each wake-up drains what waits on a socket, runs the core over it, writes what it decided into the journal,
and then sends each peer one frame with all that is due to it. So batching grows with the load, and an idle
broker answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop
import zmq

from broker.address import AddressError, Endpoints, endpoints, make_run_dir
from broker.core.events import Discard, Event, Lost, Note, Reap, Received, Send, SweepRun, Tick
from broker.estate import Estate
from broker.keys import Door, Keys
from broker.protocol import Message, Peer, decode_from_client, decode_from_worker, encode
from broker.wire import BATCH, MAX_FRAME, RETRY_S, Port, watch_over_tcp
from pipelines.graph import Pipeline

log = logging.getLogger("broker")

BACKLOG = 100_000  #: messages that may wait for one slow peer before it is given up
SLICE = 256  #: of these, how many go in one frame
PIPE = 100  #: frames that ZeroMQ holds for one peer
HURRY_S = 0.1  #: between two ticks while peers of a dead broker are awaited


class Server:
    """Translates between sockets and the core.

    Args:
        estate: The core, and what lasts longer than it.
        places: Where it can be reached, ipc before TCP.
        door: Who may come in over TCP; None: everybody.

    Raises AddressError where a place can't be had.
    """

    def __init__(self, estate: Estate, places: list[Endpoints], door: Door | None = None) -> None:
        self.core = estate.core
        self._door = door
        self._estate = estate
        self._outbox: dict[Peer, list[Message]] = {}
        self._removals: list[Reap | Discard | SweepRun] = []
        self._used: set[Port] = set()  #: sent through since the last poke
        self._stuck: dict[Peer, list[Message]] = {}  #: of peers whose pipe is full; sent when it is not
        self._warned: set[Peer] = set()
        self._retry_due = False
        self._lost: dict[Peer, None] = {}  #: a send found them gone
        self._lost_due = False
        self._ports: dict[int, Port] = {}
        self._open([place.workers for place in places], b"gw")
        self._open([place.clients for place in places], b"c")

    def _open(self, endpoints: list[str], kinds: bytes) -> None:
        """Binds one ROUTER for peers whose identity starts with one of ``kinds``."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        socket.setsockopt(zmq.SNDHWM, PIPE)
        socket.setsockopt(zmq.LINGER, 0)
        for endpoint in endpoints:
            self._bind(socket, endpoint)
        decode = decode_from_client if kinds == b"c" else decode_from_worker

        def on_frames(frames: list[bytes]) -> None:
            try:
                peer, payload = frames
                if peer[0] not in kinds:
                    raise ValueError("the identity is not of a kind that speaks here")
                messages = decode(payload)
            # msgspec's errors are ValueErrors, but for what is nested too deep
            except (ValueError, IndexError, RecursionError) as error:
                self._drop(frames[0], error)
                return
            now = time.monotonic()
            for number, message in enumerate(messages, 1):
                self._handle(Received(now, peer, message))
                if number % BATCH == 0:
                    self._flush()

        port = Port(socket, on_frames, self._flush)
        for kind in kinds:
            self._ports[kind] = port

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """What is set here for TCP is for this endpoint and those after it, not for those before."""
        if endpoint.startswith("tcp://"):
            watch_over_tcp(socket)
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        if endpoint.startswith("tcp://") and self._door is not None:
            self._door.secure(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise AddressError(f"can't listen at {endpoint}: {error.strerror}") from None

    def _drop(self, peer: Peer, error: Exception) -> None:
        """A malformed message costs its sender that message and nobody else anything."""
        self.core.board.refused["malformed"] += 1
        if peer not in self._warned and len(self._warned) < 10_000:
            self._warned.add(peer)
            log.warning("dropped a malformed message of peer %s: %s", peer.hex(), error)

    def _handle(self, event: Event) -> None:
        try:
            instructions = self.core.handle(event)
        except Exception:
            log.exception("the core failed on %.500r", event)
            self.core.board.refused["internal_error"] += 1
            return
        for instruction in instructions:
            if type(instruction) is Send:
                self._outbox.setdefault(instruction.peer, []).append(instruction.message)
            elif type(instruction) is Note:
                log.log(instruction.level, instruction.text, *instruction.values)
            elif isinstance(instruction, Reap | Discard | SweepRun):
                self._removals.append(instruction)

    def _flush(self) -> None:
        """Writes the journal, then sends every peer what is due to it.

        Peers that turn out gone are events of the core, when what is there to be read has been.
        """
        self._estate.commit()
        while self._outbox:
            outbox, self._outbox = self._outbox, {}
            for peer, messages in outbox.items():
                if peer in self._stuck:
                    self._stuck[peer] += messages
                elif not self._send(peer, messages):
                    self._stuck[peer] = messages
                    self._retry_later()
            for port in self._used:
                port.poke()
            self._used.clear()
            if self._lost and not self._lost_due:
                self._lost_due = True
                asyncio.get_running_loop().call_soon(self._on_lost)
            self._estate.commit()
        if self._removals:
            removals, self._removals = self._removals, []
            for removal in removals:
                self._estate.carry_out(removal)

    def _send(self, peer: Peer, messages: list[Message]) -> bool:
        """One frame. False: the peer's pipe is full."""
        port = self._ports[peer[0]]
        self._used.add(port)
        try:
            port.socket.send_multipart((peer, encode(messages)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if self.core.knows(peer):  # a stranger's first connection may still be coming
                self._lost[peer] = None
        return True

    def _on_lost(self) -> None:
        """Peers have gone. What they said before is read by now: some have left on purpose."""
        lost, self._lost, self._lost_due = self._lost, {}, False
        for peer in lost:
            self._handle(Lost(time.monotonic(), peer))
        self._flush()

    def _retry_later(self) -> None:
        if not self._retry_due:
            self._retry_due = True
            asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        """Tries the peers again whose pipes were full; one with too much waiting is given up."""
        self._retry_due = False
        for peer, messages in list(self._stuck.items()):
            while messages and self._send(peer, messages[:SLICE]):
                del messages[:SLICE]
            if len(messages) > BACKLOG:
                self._handle(Lost(time.monotonic(), peer))
                messages.clear()
            if not messages:
                del self._stuck[peer]
        if self._stuck:
            self._retry_later()
        self._flush()

    async def run(self) -> None:
        """Serves until cancelled."""
        beat_s, sync_s = self.core.settings.beat_s, self._estate.sync_s
        synced = time.monotonic()
        for gone in self._estate.gone:
            self._handle(gone)
        self._handle(Tick(synced))
        self._flush()
        try:
            while True:
                await asyncio.sleep(HURRY_S if self.core.awaited else min(beat_s, sync_s or beat_s))
                now = time.monotonic()
                self._handle(Tick(now))
                self._flush()
                if now - synced >= sync_s:
                    synced = now
                    self._estate.sync()
        finally:
            for port in set(self._ports.values()):
                port.close()


async def serve(  # noqa: PLR0917 - one call, in main
    pipelines: list[Pipeline],
    address: str | None,
    listen: str | None,
    state: Path | None,
    sync_s: float,
    store: str = "",
) -> None:
    """Binds the sockets and serves until SIGTERM or SIGINT. Raises AddressError."""
    where = endpoints(address)
    places = [where, endpoints(listen)] if listen is not None else [where]
    over_tcp = any(place.workers.startswith("tcp://") for place in places)
    keys = Keys.find() if over_tcp else None
    estate = Estate(pipelines, state, sync_s, store)
    door: Door | None = None
    try:
        if keys is not None:
            door = Door(keys)
        _clear(where)
        server = Server(estate, places, door)
        log.info(
            "serving %s at %s", ", ".join(p.name for p in pipelines), " and ".join(p.workers for p in places)
        )
        task = asyncio.ensure_future(server.run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        await task
    except asyncio.CancelledError:
        log.info("stopped")
    finally:
        if door is not None:
            door.close()
        _clear(where)
        estate.close()


def _clear(where: Endpoints) -> None:
    """Removes socket files, a dead broker's or our own; their folder is made, or closed to others."""
    for endpoint in where:
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            make_run_dir(path.parent)
            path.unlink(missing_ok=True)


def main() -> None:
    """``python -P -m broker.server --pipelines FILE``, started by the supervisor."""
    parser = argparse.ArgumentParser(prog="broker.server", description="The broker process.")
    parser.add_argument("--pipelines", type=Path, required=True, help="JSON file with a list of pipelines")
    parser.add_argument("--address", default=None, help="ipc:///folder or tcp://127.0.0.1:port")
    parser.add_argument("--listen", default=None, help="tcp://host:port, where peers may come in too")
    parser.add_argument("--state", type=Path, default=None, help="folder of the journal and the disk store")
    parser.add_argument("--sync", type=float, default=1.0, help="seconds between two fsyncs of the journal")
    parser.add_argument(
        "--store", default="", help="mooncake://..., instead of the state folder's disk store"
    )
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level.upper(), format="%(message)s")
    gc.freeze()
    gc.set_threshold(
        50_000, 20, 100
    )  # the core's objects are freed by their counts; scanning them is for nothing
    pipelines = msgspec.json.decode(arguments.pipelines.read_bytes(), type=list[Pipeline])
    try:
        where = arguments.address, arguments.listen, arguments.state
        uvloop.run(serve(pipelines, *where, arguments.sync, arguments.store))
    except AddressError as error:
        log.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
