"""The broker's store: which one, and the name under which it is nobody else's."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import msgspec

from adapters.disk import DiskStore
from adapters.host import forget_store_name, store_name
from adapters.store import Store

_SPACE = "mooncake"  #: the folder, in the state folder, that keeps the name of our space in a Mooncake


def open_for_broker(text: str, state: Path | None) -> Store | None:
    """The store of a broker.

    Args:
        text: An address of Mooncake's, see :class:`adapters.mooncake_client.Address`; "": the disk store.
        state: The state folder, made already; None: there is none, and no disk store.

    A Mooncake may serve several brokers. What ours keeps there has a space of its own, whose name is kept in
    the state folder, so that the next broker here knows what a dead one has left.
    """
    if not text:
        return DiskStore(state / "chunks") if state is not None else None
    from adapters.mooncake import MooncakeStore  # not at the head: few have it
    from adapters.mooncake_client import Address

    if state is None:
        space = secrets.token_hex(6)
    else:
        folder = state / _SPACE
        folder.mkdir(0o700, exist_ok=True)
        space = store_name(folder)
    return MooncakeStore(msgspec.structs.replace(Address.parse(text), space=space))


def forget(state: Path | None) -> None:
    """Nothing of ours is kept any more: the name of our space goes."""
    if state is not None and (state / _SPACE).is_dir():
        forget_store_name(state / _SPACE)
        with contextlib.suppress(OSError):
            (state / _SPACE).rmdir()
