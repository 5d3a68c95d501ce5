"""A question to a broker from where no event loop runs."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from broker.address import endpoints
from broker.protocol import (
    VERSION,
    Bye,
    Connect,
    Inspect,
    Letters,
    Report,
    decode_to_client,
    encode,
    new_peer,
)


def asked(address: str, question: Inspect | Letters, patience_ms: int) -> dict[str, Any] | None:
    """The broker's answer; None where nothing comes for so long. It blocks."""
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with dealer:
        dealer.setsockopt(zmq.IDENTITY, new_peer("c"))
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.connect(endpoints(address).clients)
        dealer.send(encode([Connect(VERSION, "cli"), question]))
        while dealer.poll(patience_ms):
            for message in decode_to_client(dealer.recv()):
                if isinstance(message, Report):
                    dealer.send(encode([Bye()]))
                    report: dict[str, Any] = msgspec.msgpack.decode(message.body)
                    return report
    return None
