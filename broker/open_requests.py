"""The requests that a client has open, and what the broker says of each."""

from __future__ import annotations

from collections.abc import Callable

from broker.protocol import Accepted, Attached, Ended, Message, Output, Refused
from broker.stream import BrokerError, RequestStream
from pipelines.graph import Limits


class OpenRequests(dict[int, RequestStream]):
    """By tag.

    Args:
        limits: Gives those of a pipeline.
    """

    def __init__(self, limits: Callable[[str], Limits]) -> None:
        super().__init__()
        self._limits = limits
        self.handlers: dict[type[Message], Callable[..., None]] = {
            Accepted: self._on_accepted,
            Attached: self._on_attached,
            Ended: self._on_ended,
            Refused: self._on_refused,
        }

    def push(self, message: Output) -> bool:
        """Hands a chunk on. False: nobody wants it."""
        stream = self.get(message.tag)
        return stream is not None and stream.push(message.output, message.chunk)

    def fail(self, tag: int, error: BrokerError) -> None:
        """One ends with this error, whether it was opened or not."""
        stream = self.pop(tag, None)
        if stream is not None and not stream.ended:
            stream.end(error, [])
            if not stream.opened.done():
                stream.opened.set_exception(error)

    def fail_all(self, error: BrokerError) -> None:
        """All that have not ended do."""
        for tag, stream in list(self.items()):
            if not stream.ended:
                self.fail(tag, error)

    def _on_accepted(self, message: Accepted) -> None:
        if (stream := self.get(message.tag)) is not None:
            stream.accept(message.request)

    def _on_attached(self, message: Attached) -> None:
        if (stream := self.get(message.tag)) is not None:
            limits = self._limits(message.pipeline)
            stream.attached(message.pipeline, message.outputs, message.call, limits)
            stream.accept(message.request)

    def _on_ended(self, message: Ended) -> None:
        stream = self.get(message.tag)
        if stream is not None and not stream.ended:  # a second introduction asks for a second end
            stream.end(BrokerError(message.error) if message.error else None, message.timings)

    def _on_refused(self, message: Refused) -> None:
        self.fail(message.tag, BrokerError(message.error))
