"""What a guardian hands to the engine process it starts: one JSON document on standard input."""

from __future__ import annotations

import msgspec

from broker.protocol import Peer
from pipelines.graph import Pipeline


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything an engine process must know."""

    endpoint: str  #: the broker's ZeroMQ endpoint for workers
    worker: Peer  #: the identity to connect with, fresh for each engine process
    guardian: Peer
    run: str  #: the broker run's nonce
    pipeline: Pipeline
    stage: str
    device: str = "cpu"
    boot: int = 0  #: the broker process's number, see :class:`broker.protocol.Welcome`
    store: str = ""  #: for :func:`adapters.store.open_store`; "": there is none


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(EngineConfig).decode
