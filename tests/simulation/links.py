"""Connections between processes: each keeps its order (ZeroMQ's promise), but they run at random speeds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Container

from broker.protocol import Message, Peer
from tests.simulation.graphs import pick

NOTHING: deque[Message] = deque()


class Links:
    """Messages under way in one direction, by the peer at the far end."""

    def __init__(self) -> None:
        self._queues: dict[Peer, deque[Message]] = {}
        self._busy: list[Peer] = []  #: peers with something under way, in no order

    def __bool__(self) -> bool:
        return bool(self._busy)

    def __getitem__(self, peer: Peer) -> deque[Message]:
        return self._queues.get(peer, NOTHING)

    def put(self, peer: Peer, message: Message) -> None:
        """One more message for a link."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = deque()
        if not queue:
            self._busy.append(peer)
        queue.append(message)

    def pick(self, rng: random.Random, paused: Container[Peer] = ()) -> Peer | None:
        """Some link with something under way; None: it stands still."""
        peer = self._busy[pick(rng, len(self._busy))]
        return None if peer in paused else peer

    def take_from(self, peer: Peer) -> Message:
        """The next message of this link, which has one."""
        queue = self._queues[peer]
        message = queue.popleft()
        if not queue:
            self._busy.remove(peer)
        return message

    def lose_newest(self, peer: Peer, kept: int) -> None:
        """All but the ``kept`` oldest messages of a link are lost."""
        queue = self[peer]
        while len(queue) > kept:
            queue.pop()
            if not queue:
                self._busy.remove(peer)

    def lose_oldest(self, peer: Peer, kept: int) -> None:
        """All but the ``kept`` newest messages of a link are lost."""
        queue = self[peer]
        while len(queue) > kept:
            queue.popleft()
            if not queue:
                self._busy.remove(peer)

    def busy(self) -> list[Peer]:
        """The links with something under way."""
        return self._busy[:]
