"""What all parts of the core share."""

from __future__ import annotations

from collections import Counter

from broker.core.blocks import Blocks
from broker.core.events import Instruction, Send
from broker.core.records import Log
from broker.core.state import Client, PipelineState, Request
from broker.protocol import Busy, Message, Peer
from pipelines.graph import Pipeline


class Board:
    """The tables, the present event's time, and what is to be done about it."""

    __slots__ = (
        "blocks",
        "clients",
        "ended",
        "log",
        "most_bytes",
        "names",
        "now",
        "out",
        "pipelines",
        "refused",
        "requests",
    )

    def __init__(self, pipelines: list[Pipeline], log: Log, most_bytes: int) -> None:
        self.pipelines = {p.name: PipelineState(p) for p in pipelines}
        self.clients: dict[Peer, Client] = {}
        self.requests: dict[int, Request] = {}  #: also ended ones that are kept
        self.names: dict[str, Request] = {}  #: those that can be continued
        self.blocks = Blocks()
        self.log = log
        self.most_bytes = most_bytes  #: of tensors under way; no chunk can have more
        self.refused: Counter[str] = Counter()  #: messages that came too late or from strangers, by reason
        self.ended: Counter[tuple[str, str]] = Counter()  #: (pipeline, status) -> requests
        self.out: list[Instruction] = []
        self.now = 0.0

    def send(self, peer: Peer, message: Message) -> None:
        """Says something to a peer."""
        self.out.append(Send(peer, message))

    def tell_busy(self, pipeline: PipelineState, retry_after_s: float) -> None:
        """Tells the gateways that a pipeline takes no more requests, or (0) that it does again."""
        for client in self.clients.values():
            if client.kind == "gateway":
                self.send(client.peer, Busy(pipeline.name, retry_after_s))
