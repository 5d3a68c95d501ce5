"""Requests: accepted or refused, continued by clients that come back, ended, kept for a while, forgotten.

A request with a name outlives its client's connection and the broker's process. Its end waits for the client
to say that it has everything (Forget); a stored one is kept for ``keep_s`` besides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from adapters.handle import Chunk, Handle
from broker.core import admission
from broker.core.admission import BAD_HANDLE, Overloaded, owns
from broker.core.board import Board
from broker.core.events import Discard, Note
from broker.core.letters import DeadLetters
from broker.core.records import Closed, Joined, Opened
from broker.core.routes import BadRequest
from broker.core.state import Client, PipelineState, Request
from broker.core.stats import SMOOTH
from broker.core.tasks import Tasks
from broker.protocol import (
    Accepted,
    Attach,
    Attached,
    Ended,
    Error,
    Refused,
    Submit,
)


class Settings(msgspec.Struct, frozen=True):
    """What the broker may keep, and for how long. Times in seconds."""

    keep_s: float = 300.0  #: a stored request that does not say, after its end
    detached_s: float = 60.0  #: one whose client has died
    letters: int = 100  #: dead letters; the oldest go
    kept: int = 1000  #: ended requests; the oldest go
    block_bytes: int = 1 << 62  #: tensors under way; beyond it nothing is accepted


class Requests:
    """All requests."""

    def __init__(self, board: Board, *, entropy: int, first_request: int, settings: Settings) -> None:
        self._board = board
        self._entropy = entropy
        self._next = first_request
        self.settings = settings
        self.letters = DeadLetters(board, settings.letters, forget=self.forget, retry=self.retry)
        self._left: dict[int, Request] = {}  #: ended, or without a client: forgotten in time
        self.tasks = Tasks(board, self.end)

    # --- in

    def submit(self, client: Client, m: Submit) -> None:
        """A new request, accepted or refused at once; or a known one, which its client continues."""
        board = self._board
        try:
            known = board.names.get(m.name) if m.name else None
            if client.requests.get(m.tag, known) is not known:
                raise BadRequest("the tag is in use", "tag")
            if known is not None:
                self._continue(known, client, m.tag, m.received)
                self._give_back(client, m)
                return
            pipeline, route = admission.route(m, board.pipelines)
            admission.check_room(m, pipeline, route, board.blocks, board.most_bytes, board.now)
            if any(m.received.values()):
                raise BadRequest("the request is not known any more", "name", status=404)
            handles = admission.given_handles(m)
            if not owns(client.arena, m.name, handles) or not board.blocks.add(client.peer, handles):
                raise BadRequest(BAD_HANDLE, "given")
        except BadRequest as error:
            board.send(client.peer, Refused(m.tag, _wire(error)))
            self._give_back(client, m)
            return
        request = admission.build(self._next, m, pipeline, route, board.now)
        seed = admission.draw_seed(self._entropy + self._next) if m.seed is None else m.seed & (1 << 63) - 1
        self._next += 1
        board.log.add(request.number, Opened(m, client.peer, board.now, seed))
        self._join(request, client, m.tag)
        board.send(client.peer, Accepted(m.tag, request.number))
        self.open(request, seed)
        if admission.full(pipeline) and not pipeline.busy:
            pipeline.busy = True
            board.tell_busy(pipeline, admission.retry_after(pipeline))

    def _give_back(self, client: Client, m: Submit) -> None:
        """What a submission brought that nobody uses: it was refused, or its request has its own."""
        handles = admission.given_handles(m)
        blocks = [handle.block for handle in handles if owns(client.arena, m.name, [handle])]
        self._board.blocks.audit(client.peer, blocks, self._board.out)
        if (
            any(handle.file for handle in handles)
            and m.name not in self._board.names
            and admission.is_name(m.name)
        ):
            self._board.out.append(Discard(m.name))

    def open(self, request: Request, seed: int) -> None:
        """The request begins: its inputs go to the stages that want them. Their blocks are known."""
        board = self._board
        self._next = max(self._next, request.number + 1)
        request.seed = seed
        request.pipeline.unfinished += 1
        board.requests[request.number] = request
        if request.name:
            board.names[request.name] = request
        for name, chunks in request.submit.given.items():
            for slot in request.route.given[name]:
                feed = request.tasks[slot.stage].feeds[slot.position]
                feed.chunks, feed.closed = list(chunks), True
                for chunk in chunks:
                    board.blocks.retain(chunk.handles)
            for chunk in chunks:
                if request.name and chunk.handles:
                    board.blocks.retain(chunk.handles)  # for the dead letters
                    request.note_files(chunk.handles)
                board.blocks.sweep(chunk.handles, board.out)
        for number in request.route.stages:
            self.tasks.queue_if_ready(request.tasks[number])

    def attach(self, client: Client, m: Attach) -> None:
        """A client takes a known request over."""
        board = self._board
        request = board.names.get(m.name)
        if request is None or client.requests.get(m.tag, request) is not request:
            error = Error("not_found", "there is no such request, or it is forgotten", 404, "name")
            board.send(client.peer, Refused(m.tag, error))
            return
        submit = request.submit
        board.send(client.peer, Attached(m.tag, request.number, submit.pipeline, submit.outputs, submit.call))
        self._continue(request, client, m.tag, m.received)

    def _continue(self, request: Request, client: Client, tag: int, received: dict[str, int]) -> None:
        board = self._board
        if (request.client, request.tag) != (client, tag):
            if request.listener is not None and request.ended is None:
                taken = Error("taken_over", "another client continues this request", 409)
                board.send(request.listener.peer, Ended(request.tag, "cancelled", taken, []))
            self.part(request)
        self._join(request, client, tag)
        board.send(client.peer, Accepted(tag, request.number))
        if request.letter:
            self.part(request, tell=True)
            return
        if self._lacks(request, received):
            message = "the broker was restarted, and this pipeline keeps nothing (checkpoint: none)"
            error = Error("lost_in_restart", message, 503, retry_after_s=1.0)
            if request.ended is None:
                self.end(request, "failed", error, False)
            else:
                board.send(client.peer, Ended(tag, "failed", error, []))
            return
        board.log.add(request.number, Joined(client.peer, tag))
        self.tasks.flow.resend(request, received)
        if request.ended is not None:
            self._send_end(request)

    def _lacks(self, request: Request, received: dict[str, int]) -> bool:
        """Whether outputs that the client has not received are not kept."""
        if request.keeps:
            return False
        emitted = {
            output: request.tasks[number].emitted
            for number, outputs in request.route.outputs.items()
            for output in outputs
        }
        return any(received.get(output, 0) < count for output, count in emitted.items())

    def _join(self, request: Request, client: Client, tag: int) -> None:
        request.client, request.tag = client, tag
        client.requests[tag] = request
        client.unclaimed.discard(tag)
        if request.ended is None:
            self._left.pop(request.number, None)

    # --- out

    def client_gone(self, client: Client, *, on_purpose: bool) -> None:
        """A client that leaves cancels what is not stored; a gateway's death was no caller's choice."""
        goes_on = not on_purpose and client.kind == "gateway"
        for request in list(client.requests.values()):
            if request.name and (request.submit.stored or goes_on):
                self.detach(request)
            else:
                lost = "the broker lost its client, which was silent or whose connection broke; ask again"
                self.cancel(request, None if on_purpose else Error("client_lost", lost, 503))

    def abort(self, request: Request, *, leave: bool) -> None:
        """The caller wants no more of it."""
        if leave and request.submit.stored:
            self.detach(request)
        else:
            self.cancel(request)

    def cancel(self, request: Request, error: Error | None = None) -> None:
        """Nobody wants it. The error is for a client that was given up, and may be there all the same."""
        if request.ended is None:
            self.end(request, "cancelled", error, False)
        if request.number in self._board.requests and not request.letter:
            self.forget(request)

    def detach(self, request: Request) -> None:
        """It goes on without a client."""
        if not request.keeps and request.ended is None:
            self.cancel(request)  # what it gives now would be lost
            return
        if request.client is not None:
            self.part(request)
            self._board.log.add(request.number, Joined(b"", 0))
        request.left = self._board.now
        self._left[request.number] = request
        self.tasks.flow.nobody_waits(request)

    def part(self, request: Request, *, tell: bool = False) -> None:
        """Client and request know each other no more; with ``tell`` the client hears of its end."""
        client = request.client
        if client is not None:
            if tell and request.listener is not None:
                self._send_end(request)
            client.requests.pop(request.tag, None)
            client.unclaimed.discard(request.tag)
            request.client = None

    def delivered(self, request: Request) -> None:
        """The client has everything, or was told by the broker before this one that it has no more to get."""
        if request.submit.stored or request.ended is None:
            self.detach(request)
        else:
            self.forget(request)

    def end(self, request: Request, status: str, error: Error | None, exhausted: bool) -> None:
        """The request is over: whatever still runs for it is told to stop, and its memory is let go.

        ``exhausted``: one of its tasks has failed as often as it may.
        """
        board = self._board
        for task in request.tasks.values():
            self.tasks.leave(task)
        pipeline = request.pipeline
        timings = [task.timing for task in request.tasks.values()]
        request.ended = Ended(request.tag, status, error, timings)  # type: ignore[arg-type]
        request.left = board.now
        self._count_end(pipeline, status)
        board.out.append(_note(request, status, error, board.now))
        letter = exhausted and bool(request.name) and status == "failed" and self.letters.may_keep(request)
        if letter:
            self._letter(request)
        board.log.add(request.number, Closed(status, error, timings, board.now, letter))
        if letter:
            self.part(request, tell=True)
            return
        if request.listener is not None:
            self._send_end(request)
        if not request.name or status == "cancelled":
            self.forget(request)
        else:
            self._left[request.number] = request

    def _send_end(self, request: Request) -> None:
        ended = request.ended
        assert request.client is not None
        assert ended is not None
        message = Ended(request.tag, ended.status, ended.error, ended.timings)
        self._board.send(request.client.peer, message)

    def _count_end(self, pipeline: PipelineState, status: str) -> None:
        board = self._board
        board.ended[pipeline.name, status] += 1
        pipeline.unfinished -= 1
        pipeline.pace += (min(board.now - pipeline.last_end, 60.0) - pipeline.pace) * SMOOTH
        pipeline.last_end = board.now
        most = pipeline.spec.limits.max_requests
        if pipeline.busy and pipeline.unfinished <= most - max(1, most // 16):
            pipeline.busy = False
            board.tell_busy(pipeline, 0.0)

    def forget(self, request: Request) -> None:
        """Nothing of it is needed any more."""
        board = self._board
        self.part(request)
        board.requests.pop(request.number, None)
        if board.names.get(request.name) is request:
            del board.names[request.name]
        self._left.pop(request.number, None)
        self.letters.remove(request)
        self._drop_outputs(request)
        if request.name:
            board.blocks.drop(admission.given_handles(request.submit), board.out)
            if (request.files or request.pipeline.durable) and request.name not in board.names:
                board.out.append(Discard(request.name))
        board.log.drop(request.number)
        request.tasks = {}  # they hold each other, and nobody looks for cycles in this process

    def cut_outputs(self, request: Request, lost: Callable[[Handle], bool]) -> None:
        """Ends each output before its first chunk that is lost."""
        kept: list[tuple[str, Chunk]] = []
        cut: set[str] = set()
        for output, chunk in request.outputs:
            if output in cut or any(map(lost, chunk.handles)):
                cut.add(output)
                self._board.blocks.drop(chunk.handles, self._board.out)
            else:
                kept.append((output, chunk))
        request.outputs = kept

    def _drop_outputs(self, request: Request) -> None:
        for _, chunk in request.outputs:
            self._board.blocks.drop(chunk.handles, self._board.out)
        request.outputs = []

    # --- time

    def tick(self) -> None:
        """Ends requests whose deadline has passed, and forgets those that were kept long enough."""
        board, settings = self._board, self.settings
        now = board.now
        for request in list(board.requests.values()):
            if request.ended is None and request.deadline is not None and request.deadline < now:
                error = Error("timeout", "the request's deadline has passed", 504)
                self.end(request, "failed", error, False)
        for request in list(self._left.values()):
            stored = request.submit.stored
            keep_s = request.submit.keep_s
            kept_for = settings.keep_s if keep_s is None else keep_s
            kept_for = kept_for if stored else settings.detached_s
            if request.client is not None or (request.ended is None and stored):
                continue  # a slow reader may take its time
            if now - request.left > kept_for:
                self.cancel(request)
        ended = [r for r in self._left.values() if r.ended is not None and r.client is None]
        for request in ended[: max(0, len(ended) - settings.kept)]:
            self.forget(request)
        self.tasks.flow.unlock()

    # --- dead letters

    def _letter(self, request: Request) -> None:
        """A request that has failed for good is kept with its inputs, for a person to look at."""
        request.letter = True
        self._left.pop(request.number, None)  # its client may have left before
        self._drop_outputs(request)
        self.letters.add(request)

    def retry(self, letter: Request) -> None:
        """Submits a dead letter again, as a stored request that nobody waits for."""
        board = self._board
        submit = msgspec.structs.replace(letter.submit, stored=True, received={}, deadline_s=None)
        request = admission.build(self._next, submit, letter.pipeline, letter.route, board.now)
        request.files = letter.files
        board.log.add(request.number, Opened(submit, b"", board.now, letter.seed))
        self.open(request, letter.seed)
        self.detach(request)
        self.forget(letter)


def _wire(error: BadRequest) -> Error:
    if isinstance(error, Overloaded):
        return Error("overloaded", str(error), error.status, error.param, error.retry_after_s)
    kind = "not_found" if error.status == 404 else "invalid_request_error"
    return Error(kind, str(error), error.status, error.param)


def _note(request: Request, status: str, error: Error | None, now: float) -> Note:
    if error is None:
        seconds = now - request.accepted
        return Note(logging.DEBUG, "request %d of %s: %s after %.3f s", (*request.line, status, seconds))
    return Note(logging.WARNING, "request %d of %s %s: %s", (*request.line, status, error.message))
