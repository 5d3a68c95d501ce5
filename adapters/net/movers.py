"""Other ways for the bytes of a block than the connection on which it is asked for.

Whoever fetches asks the data server for a *ticket*, on the connection that both have proved themselves on,
and presents it where the bytes are: so a way needs no keys of its own to know whom to serve. What it moves is
not encrypted.

There is one: UCX (:mod:`adapters.net.ucx`), where the extra `ucx` is installed.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

from adapters.net.wire import Ticket


class Lender(Protocol):
    """The serving side. Thread-safe."""

    name: str

    def lend(self, number: int, data: memoryview) -> Ticket:
        """A ticket for a block, good once and for some seconds. Keeps the memory while it may be read.

        Raises AdapterError where it can't be.
        """
        ...

    def close(self) -> None:
        """Ends all transfers. Idempotent."""
        ...


class Puller(Protocol):
    """The fetching side. To be used on one event loop only."""

    name: str

    async def pull(self, host: str, ticket: Ticket, into: memoryview) -> None:
        """Fills the buffer, which has the block's size. Raises :class:`adapters.net.link.Silent`.

        If this fails, or is cancelled, the buffer may still be written to: it must not be used any more.

        Args:
            host: The data server's IP address.
            ticket: From there, not presented yet.
            into: Kept while a transfer may write to it.
        """
        ...

    def close(self) -> None:
        """Ends all transfers. Idempotent."""
        ...


@functools.cache
def has_ucx() -> bool:
    """Whether the extra `ucx` is installed."""
    return importlib.util.find_spec("ucxx") is not None
