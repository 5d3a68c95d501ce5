"""Connections between processes: each keeps its order (ZeroMQ's promise), but they run at random speeds."""

from __future__ import annotations

import random
from collections import deque

from broker.protocol import Message, Peer
from tests.simulation.graphs import pick


class Links:
    """Messages under way in one direction, by the peer at the far end."""

    def __init__(self) -> None:
        self._queues: dict[Peer, deque[Message]] = {}
        self._busy: list[Peer] = []  #: peers with something under way, in no order

    def __bool__(self) -> bool:
        return bool(self._busy)

    def __getitem__(self, peer: Peer) -> deque[Message]:
        return self._queues.get(peer) or deque()

    def put(self, peer: Peer, message: Message) -> None:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = deque()
        if not queue:
            self._busy.append(peer)
        queue.append(message)

    def take(self, rng: random.Random) -> tuple[Peer, Message]:
        """The next message of some link."""
        index = pick(rng, len(self._busy))
        peer = self._busy[index]
        queue = self._queues[peer]
        message = queue.popleft()
        if not queue:
            self._busy[index] = self._busy[-1]
            self._busy.pop()
        return peer, message

    def cut(self, peer: Peer, kept: int) -> None:
        """All but the oldest messages of a link are lost."""
        queue = self._queues.get(peer)
        if queue:
            while len(queue) > kept:
                queue.pop()
            if not queue:
                self._busy.remove(peer)
