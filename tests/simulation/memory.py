"""The host's memory: which blocks there are, whose they are, and who looks at them."""

from __future__ import annotations

from collections import Counter, defaultdict

from adapters.handle import BlockId, Chunk, Handle


class Memory:
    """Blocks of all arenas. Fails on a free too many, and on one while somebody looks at the block."""

    def __init__(self) -> None:
        self._arenas: defaultdict[str, set[BlockId]] = defaultdict(set)
        self._lookers: Counter[BlockId] = Counter()
        self._offset = 0

    def put(self, arena: str) -> Handle:
        self._offset += 1
        block = BlockId(f"{arena}0", self._offset, 1)
        self._arenas[arena].add(block)
        return Handle("shm", block, 4, "float32", (1,))

    def left(self, arena: str) -> set[BlockId]:
        """The blocks of an arena."""
        return self._arenas.get(arena, set())

    def free(self, arena: str, block: BlockId) -> None:
        """The broker says that nobody needs this: it must be true, and be said once."""
        assert block in self._arenas[arena], f"{block} freed twice, or by the wrong owner"
        self._arenas[arena].remove(block)
        self._check_unused(block)

    def reap(self, arena: str) -> None:
        """A dead producer's arena goes."""
        for block in self._arenas.pop(arena, set()):
            self._check_unused(block)

    def look(self, handle: Handle) -> None:
        """Somebody maps a block: it must be there."""
        block = handle.block
        arena = block.place[:-1]
        assert block in self._arenas.get(arena, ()), f"{block} was freed, but is still sent"
        self._lookers[block] += 1

    def look_away(self, block: BlockId) -> None:
        self._lookers[block] -= 1
        if not self._lookers[block]:
            del self._lookers[block]

    def _check_unused(self, block: BlockId) -> None:
        assert block not in self._lookers, f"{block} freed while somebody looks at it"


class Views:
    """What one process looks at."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: Counter[BlockId] = Counter()

    def open(self, chunk: Chunk) -> None:
        for handle in chunk.handles:
            self._memory.look(handle)
            self._held[handle.block] += 1

    def close(self, block: BlockId) -> None:
        self._memory.look_away(block)
        self._held[block] -= 1

    def die(self) -> None:
        """The process is gone, and its views with it."""
        for block in self._held.elements():
            self._memory.look_away(block)
        self._held.clear()
