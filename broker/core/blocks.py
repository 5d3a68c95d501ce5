"""Who still needs which block of memory.

A block is kept while an edge retains the chunk that names it (a later attempt may read it) or while a peer
holds it (it was sent the handle and has not released it). The owner is told to free it exactly once.

A broker that was restarted does not know who holds what until all have told it. Until then blocks that
nobody seems to need wait in limbo: a peer's :class:`broker.protocol.Resync` may claim them.
"""

from __future__ import annotations

from collections import Counter

from adapters.handle import BlockId, Handle
from broker.core.events import Instruction, Reap, Send
from broker.protocol import Free, Peer

NOBODY = b""  #: owns files that are left to the end of their request


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
        self._limbo: dict[BlockId, _Block] | None = None
        self.nbytes = 0  #: of memory in blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def holds(self) -> int:
        """How many (peer, block) holds there are."""
        return sum(len(held) for held in self._holds.values())

    def known(self, handle: Handle) -> bool:
        """Whether a chunk that names this block is alive."""
        return handle.block in self._blocks

    def add(self, owner: Peer, handles: list[Handle]) -> bool:
        """Takes note of a new chunk's blocks; false (and nothing noted) when one is known already."""
        if any(h.block in self._blocks for h in handles) or len({h.block for h in handles}) < len(handles):
            return False
        for handle in handles:
            self._enter(handle.block, _Block(owner, _size(handle)))
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
        for key, count in self._holds.pop(peer, Counter()).items():
            for _ in range(count):
                self._decrement(key, out)
        owned = self._owned.pop(peer, 0)
        if not arena:
            return
        if not owned and self._limbo is None:
            out.append(Reap(arena))
            return
        orphan = arena.encode()  # the peer may come back, with another arena
        for block in (*self._blocks.values(), *(self._limbo or {}).values()):
            if block.owner == peer:
                block.owner = orphan
        self._owned[orphan] += owned
        self._orphans[orphan] = arena

    # --- after a restart

    @property
    def in_limbo(self) -> bool:
        """Whether nothing is freed yet."""
        return self._limbo is not None

    @property
    def orphaned(self) -> set[str]:
        """The arenas of dead owners that are still needed."""
        return set(self._orphans.values())

    def enter_limbo(self) -> None:
        """From now on nothing is freed; nobody holds anything, as far as we know."""
        self._limbo = {}
        self._holds.clear()

    def forget_holds(self, out: list[Instruction]) -> None:
        """Undoes the holds that replaying a journal has made: the peers say themselves what they hold."""
        for held in self._holds.values():
            for block, count in held.items():
                for _ in range(count):
                    self._decrement(block, out)
        self._holds.clear()

    def claim(self, peer: Peer, holds: list[BlockId], owner_of: dict[str, Peer]) -> None:
        """A peer says what it has been holding. ``owner_of``: arena -> its owner."""
        held = self._holds.setdefault(peer, Counter())
        for key in holds:
            if key not in self._blocks:
                self._enter(key, self._from_limbo(key) or _Block(self._owner(key, owner_of), 0))
            held[key] += 1
            self._blocks[key].count += 1
        if not held:
            del self._holds[peer]

    def audit(self, owner: Peer, lent: list[BlockId], out: list[Instruction]) -> None:
        """An owner says which of its blocks are out. Those that nobody needs are freed, in limbo later."""
        for key in lent:
            if key in self._blocks:
                self._own(self._blocks[key], owner)
            elif self._limbo is None:
                out.append(Send(owner, Free([key])))
            else:
                self._own(self._limbo.setdefault(key, _Block(owner, 0)), owner)

    def _own(self, block: _Block, owner: Peer) -> None:
        """The owner of a file is not in its name: it is known again when it says so."""
        if block.owner == NOBODY:
            if block.count:
                self._owned[NOBODY] -= 1
                self._owned[owner] += 1
            block.owner = owner

    def adopt(self, owner: Peer, handles: list[Handle]) -> None:
        """Like :meth:`add`, for a chunk out of the journal: another one may have named a block already."""
        for handle in handles:
            if handle.block in self._blocks:
                continue
            self._enter(handle.block, self._from_limbo(handle.block) or _Block(owner, _size(handle)))

    def orphan(self, owner: Peer, arena: str) -> None:
        """The owner of an arena was dead before we came."""
        self._orphans[owner] = arena

    def leave_limbo(self, out: list[Instruction]) -> None:
        """All who live have told what they hold: what is in limbo is freed."""
        limbo, self._limbo = self._limbo or {}, None
        for key, block in limbo.items():
            if block.owner not in self._orphans and block.owner != NOBODY:
                out.append(Send(block.owner, Free([key])))
        for owner, arena in [(o, a) for o, a in self._orphans.items() if not self._owned[o]]:
            del self._orphans[owner]
            out.append(Reap(arena))

    def _from_limbo(self, key: BlockId) -> _Block | None:
        return self._limbo.pop(key, None) if self._limbo is not None else None

    def _owner(self, key: BlockId, owner_of: dict[str, Peer]) -> Peer:
        arena = arena_of(key)
        if not arena:
            return NOBODY
        owner = owner_of.get(arena)
        if owner is None:
            owner = arena.encode()
            self._orphans[owner] = arena
        return owner

    # --- small parts

    def _enter(self, key: BlockId, block: _Block) -> None:
        if self._limbo is not None:
            self._limbo.pop(key, None)
        self._blocks[key] = block
        self.nbytes += block.nbytes
        self._owned[block.owner] += 1

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
        last = self._owned[owner] == 0
        if last:
            del self._owned[owner]
        if self._limbo is not None:
            self._limbo[key] = block
            return
        arena = self._orphans.get(owner)
        if arena is None:
            if owner != NOBODY:
                out.append(Send(owner, Free([key])))
        elif last:
            del self._orphans[owner]
            out.append(Reap(arena))


def _size(handle: Handle) -> int:
    """Bytes of memory that a block takes; one on disk takes none."""
    return handle.nbytes if handle.transport == "shm" else 0


def arena_of(key: BlockId) -> str:
    """The arena (prefix) that a block of shared memory lies in; "" for a file of the disk store."""
    return "" if "/" in key.place else key.place[: key.place.rfind("-") + 1]
