"""The hosts' memory and disks: which blocks there are, whose they are, and who looks at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from adapters.handle import BlockId, Chunk, Handle
from adapters.host import host_of
from broker.protocol import Peer


class Gone(Exception):
    """A block is neither in memory nor on disk: it was lost with its host."""


class Memory:
    """Blocks of all arenas. Fails on a free too many, and on one while somebody looks at the block.

    Args:
        run: The nonce in the arenas' names.
        counts: Whether a peer has a right to what it looks at; one that the broker has given up has not.
    """

    def __init__(self, run: str, counts: Callable[[Peer], bool]) -> None:
        self._run = run
        self._counts = counts
        self.arenas: dict[str, set[BlockId]] = {}
        self.files: dict[str, set[str]] = {}  #: the disk store: folder -> its files
        self.host_died = False
        self._lookers: dict[BlockId, Counter[Peer]] = {}
        self.given_back: set[BlockId] = set()  #: of submissions that were refused
        self._discarded: set[str] = set()
        self._freed: set[BlockId] = set()
        self.reaped: set[str] = set()  #: arenas that the broker has removed
        self.doubles = False  #: blocks may be freed again
        self._count = 0

    # --- writing

    def open_arena(self, host: str) -> str:
        """A fresh arena's name on a host; there is nothing of it before the first block."""
        self._count += 1
        return f"omni-{self._run}-{host}{self._count:0{12 if host else 8}x}-"

    def put(self, arena: str, folder: str, *, durable: bool = False, spilled: bool = False) -> Handle:
        """A new block of an arena, with a copy on disk if ``durable``; or a file alone."""
        self._count += 1
        host = host_of(arena)
        if spilled:
            return Handle("disk", BlockId(self._write(folder, host), 0, 1), 16, "float32", (4,))
        block = BlockId(f"{arena}0", self._count, 1)
        self.arenas.setdefault(arena, set()).add(block)
        return Handle("shm", block, 16, "float32", (4,), self._write(folder, host) if durable else "")

    def _write(self, folder: str, host: str) -> str:
        file = f"{folder}/{host}-{self._count}"
        self.files.setdefault(folder, set()).add(file)
        return file

    # --- reading

    def look(self, handle: Handle, peer: Peer) -> None:
        """Somebody maps a block: it must be there, or its copy. Raises Gone where that can't be asked."""
        if self.lost(handle):
            if not self.host_died and self._counts(peer) and not self._over(handle):
                raise AssertionError(f"{handle.block} was freed, but is still sent to {peer!r}")
            raise Gone(str(handle.block))
        self._lookers.setdefault(handle.block, Counter())[peer] += 1

    def lost(self, handle: Handle) -> bool:
        """Whether a tensor's bytes are nowhere any more."""
        return not self._there(handle)

    def seems_lost(self, handle: Handle) -> bool:
        """Whether the broker would say so, which can look at its own host only."""
        place = handle.block.place
        away = place.partition("/")[2][:1] not in ("", "-") if "/" in place else host_of(place) != ""
        return not away and self.lost(handle)

    def _over(self, handle: Handle) -> bool:
        """Whether its request was over, or refused: who still works for it is being told."""
        if handle.block in self.given_back:
            return True
        return handle.transport == "disk" and handle.block.place.partition("/")[0] in self._discarded

    def _there(self, handle: Handle) -> bool:
        place = handle.block.place
        if handle.transport == "disk":
            return self._has_file(place)
        return handle.block in self.arenas.get(place[:-1], ()) or self._has_file(handle.copy)

    def _has_file(self, file: str) -> bool:
        return file in self.files.get(file.partition("/")[0], ())

    def look_away(self, block: BlockId, peer: Peer) -> None:
        """Somebody looks at it no longer."""
        lookers = self._lookers.get(block)
        if lookers is None:  # a copy on another host outlives what it was made of
            return
        lookers[peer] -= 1
        if not lookers[peer]:
            del lookers[peer]
            if not lookers:
                del self._lookers[block]

    # --- freeing

    def free(self, block: BlockId) -> None:
        """The broker says that nobody needs this: it must be true, and be said once."""
        if "/" in block.place:
            assert self.doubles or block not in self._freed, f"{block} freed twice"
            self._freed.add(block)
            folder = block.place.partition("/")[0]
            files = self.files.get(folder, set())
            files.discard(block.place)
            if not files:
                self.files.pop(folder, None)
            return
        blocks = self.arenas.get(block.place[:-1], set())
        if block in blocks:
            blocks.remove(block)
            self._freed.add(block)
            self._check_unused(block)
        elif block.place[:-1] not in self.reaped:  # a broker that was restarted reads of some chunks again
            assert block in self._freed, f"{block} is no block of ours"
            assert self.doubles, f"{block} freed twice"

    def reap(self, arena: str) -> None:
        """A dead producer's arena goes."""
        self.reaped.add(arena)
        for block in self.arenas.pop(arena, set()):
            self._check_unused(block)

    def dead(self, host: str, living: set[str]) -> list[str]:
        """The arenas on a host whose owners hold no lock."""
        return [arena for arena in self.arenas if host_of(arena) == host and arena not in living]

    def folders(self, host: str) -> list[str]:
        """The requests that have files on a host."""
        return [folder for folder in self.files if self._of(folder, host)]

    def sweep(self, kept: frozenset[str], living: set[str]) -> None:
        """What on the broker's host belongs to neither these nor to the living goes."""
        for arena in self.dead("", living):
            if arena not in kept:
                self.reap(arena)

    def sweep_files(self, kept: set[str]) -> None:
        """Folders of the broker's disk store that belong to no request go."""
        for folder in self.folders(""):
            if folder not in kept:
                self.discard(folder, "")

    def discard(self, folder: str, host: str) -> None:
        """A request's files on a host go. Who still reads one keeps his view (POSIX)."""
        files = self.files.get(folder, set())
        files -= self._of(folder, host)
        if not files:
            self.files.pop(folder, None)
        self._discarded.add(folder)

    def _of(self, folder: str, host: str) -> set[str]:
        return {file for file in self.files.get(folder, ()) if file.startswith(f"{folder}/{host}-")}

    def lose_all(self) -> None:
        """The broker's host dies; its disk does not."""
        for arena in [arena for arena in self.arenas if not host_of(arena)]:
            for block in self.arenas.pop(arena):
                self._lookers.pop(block, None)
        self.host_died = True

    def _check_unused(self, block: BlockId) -> None:
        for peer in self._lookers.get(block, ()):
            assert not self._counts(peer), f"{block} freed while {peer!r} looks at it"


class Views:
    """What one process looks at."""

    def __init__(self, memory: Memory, peer: Peer) -> None:
        self._memory = memory
        self._peer = peer
        self._held: Counter[BlockId] = Counter()

    def open(self, chunk: Chunk) -> None:
        """Maps a chunk's blocks. Raises Gone, with none of them mapped."""
        for number, handle in enumerate(chunk.handles):
            try:
                self._memory.look(handle, self._peer)
            except Gone:
                for opened in chunk.handles[:number]:
                    self.close(opened.block)
                raise
            self._held[handle.block] += 1

    def close(self, block: BlockId) -> None:
        """Lets go of one view."""
        self._memory.look_away(block, self._peer)
        self._held[block] -= 1
        if not self._held[block]:
            del self._held[block]

    def die(self) -> None:
        """The process is gone, and its views with it."""
        for block in self._held.elements():
            self._memory.look_away(block, self._peer)
        self._held.clear()
