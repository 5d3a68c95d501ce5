"""Peers of a dead broker introduce themselves to the new one.

An introduction takes effect as a whole, at its Resync. Until then its sender is a ghost that is told nothing
but Who: what the peer says it holds was so when it began to speak, so nothing may be sent to it meanwhile. A
peer that begins anew (it had spoken to a broker that died in the middle) has said nothing before.
"""

from __future__ import annotations

from broker.protocol import (
    Abort,
    Attach,
    Bye,
    Checkpoint,
    Connect,
    Emit,
    Failed,
    Finish,
    Forget,
    Message,
    Peer,
    Ready,
    Resync,
    Submit,
    Taken,
    Took,
)

PARTS = frozenset({Emit, Finish, Failed, Checkpoint, Took, Submit, Attach, Taken, Abort, Forget, Bye})


class Introductions(dict[Peer, list[Message] | None]):
    """Whose Resync is still to come -> what it has said of its introduction; None: not even the beginning.

    Args:
        boot: Ours. An introduction to a broker before us lacks what was still under way from that one.
    """

    def __init__(self, boot: int) -> None:
        super().__init__()
        self._boot = boot

    def admit(self, peer: Peer, message: Message) -> list[Message]:
        """What is to be handled, now that an awaited peer has said this: the Resync before the rest."""
        kind = type(message)
        if kind is Ready:
            self[peer] = [message]
            return []
        if kind is Connect:
            self[peer] = []
            return [message]  # a client waits for the answer before it goes on
        if kind is not Resync and kind not in PARTS:
            return [message]
        said = self[peer]
        if said is None:
            return []  # it was on its way to a broker before us, and comes again
        if type(message) is Resync:
            if message.boot != self._boot:
                self[peer] = None
                return []
            del self[peer]
            return [message, *said]
        said.append(message)
        return []
