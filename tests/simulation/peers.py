"""What engines and callers have in common: an arena to give from, and views of others' blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from adapters.handle import BlockId, Chunk
from broker.protocol import Free, Message, Peer, Release
from tests.simulation.memory import Views

if TYPE_CHECKING:
    from tests.simulation.world import World


class Producer:
    """A process with an arena."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world = world
        self.peer = peer
        self.arena = f"omni-{world.run_nonce}-{peer.hex():0<8}-"
        self.views = Views(world.memory)

    def send(self, message: Message) -> None:
        self.world.up.put(self.peer, message)

    def chunk(self, seq: int, value: int, *, last: bool) -> Chunk:
        """A chunk that says ``value``; every second value comes with a block."""
        handles = [self.world.memory.put(self.arena)] if value % 2 else []
        return Chunk(seq, last, msgspec.Raw(msgspec.msgpack.encode(value)), handles)

    def see(self, chunk: Chunk) -> int:
        """Looks at a chunk's blocks and says its value."""
        self.views.open(chunk)
        value: int = msgspec.msgpack.decode(chunk.body)
        return value

    def release(self, blocks: list[BlockId]) -> None:
        """Looks at them no longer."""
        for block in blocks:
            self.views.close(block)
        if blocks:
            self.send(Release(blocks))

    def freed(self, m: Free) -> None:
        for block in m.blocks:
            self.world.memory.free(self.arena, block)
