"""Who still needs which block of shared memory.

A block is kept while an edge retains the chunk that names it (a later attempt may read it) or while a peer
holds it (it was sent the handle and has not released it). The owner is told to free it exactly once.
"""

from __future__ import annotations

from collections import Counter

from adapters.handle import BlockId, Handle
from broker.core.events import Instruction, Reap, Send
from broker.protocol import Free, Peer


class _Block:
    __slots__ = ("count", "nbytes", "owner")

    def __init__(self, owner: Peer, nbytes: int) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.count = 0


class Blocks:
    """Reference counts of every block that a live chunk names."""

    def __init__(self) -> None:
        self._blocks: dict[BlockId, _Block] = {}
        self._holds: dict[Peer, Counter[BlockId]] = {}
        self._owned: Counter[Peer] = Counter()
        self._orphans: dict[Peer, str] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def holds(self) -> int:
        """How many (peer, block) holds there are."""
        return sum(len(held) for held in self._holds.values())

    def add(self, owner: Peer, handles: list[Handle]) -> bool:
        """Takes note of a new chunk's blocks; false (and nothing noted) when one is known already."""
        if any(h.block in self._blocks for h in handles) or len({h.block for h in handles}) < len(handles):
            return False
        for handle in handles:
            self._blocks[handle.block] = _Block(owner, handle.nbytes)
            self.nbytes += handle.nbytes
        self._owned[owner] += len(handles)
        return True

    def retain(self, handles: list[Handle]) -> None:
        """One more edge needs these."""
        for handle in handles:
            self._blocks[handle.block].count += 1

    def drop(self, handles: list[Handle], out: list[Instruction]) -> None:
        """One edge needs these no longer."""
        for handle in handles:
            self._decrement(handle.block, out)

    def hold(self, peer: Peer, handles: list[Handle]) -> None:
        """The peer is being sent these."""
        held = self._holds.setdefault(peer, Counter())
        for handle in handles:
            held[handle.block] += 1
            self._blocks[handle.block].count += 1

    def release(self, peer: Peer, blocks: list[BlockId], out: list[Instruction]) -> None:
        """The peer looks at these no longer. What it does not hold is ignored: it may come twice or late."""
        held = self._holds.get(peer)
        if held is None:
            return
        for block in blocks:
            if held[block] > 1:
                held[block] -= 1
            elif block in held:
                del held[block]
            else:
                continue
            self._decrement(block, out)
        if not held:
            del self._holds[peer]

    def sweep(self, handles: list[Handle], out: list[Instruction]) -> None:
        """Frees those of a new chunk's blocks that nobody turned out to need."""
        for handle in handles:
            block = self._blocks.get(handle.block)
            if block is not None and block.count == 0:
                self._forget(handle.block, block, out)

    def peer_gone(self, peer: Peer, arena: str, out: list[Instruction]) -> None:
        """The peer is dead: its holds end; its own blocks stay readable until their last use, then Reap."""
        for block, count in self._holds.pop(peer, Counter()).items():
            for _ in range(count):
                self._decrement(block, out)
        if arena:
            if self._owned[peer]:
                self._orphans[peer] = arena
            else:
                out.append(Reap(arena))
        if not self._owned[peer]:
            del self._owned[peer]

    def _decrement(self, key: BlockId, out: list[Instruction]) -> None:
        block = self._blocks[key]
        block.count -= 1
        if block.count == 0:
            self._forget(key, block, out)

    def _forget(self, key: BlockId, block: _Block, out: list[Instruction]) -> None:
        del self._blocks[key]
        self.nbytes -= block.nbytes
        owner = block.owner
        self._owned[owner] -= 1
        orphan = self._orphans.get(owner)
        if orphan is None:
            out.append(Send(owner, Free([key])))
        if self._owned[owner] == 0:
            del self._owned[owner]
            if orphan is not None:
                del self._orphans[owner]
                out.append(Reap(orphan))
