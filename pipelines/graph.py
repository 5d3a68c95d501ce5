"""A pipeline as data: stages, the edges between them, and what each may use.

These structs are what pipeline.yaml decodes into (see :mod:`pipelines.loader`) and what the broker, its
gateway and the workers are told when they connect. They hold no code: engines and transfer adapters are
named by strings and looked up by the workers alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

#: The pseudo-stage whose "output" is what the caller sent.
REQUEST = "request"

Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many jobs an engine works on together."""

    max_num_seqs: Positive = 8  #: jobs a worker holds at once: its credit
    max_batch_size: Positive = 8  #: items in one forward pass of a batching engine
    wait_ms: Annotated[float, Meta(ge=0, le=10_000)] = 0.0  #: how long a forward pass waits for company


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between how many workers a stage may have; the broker decides (see :mod:`broker.core.scaling`)."""

    min: Count = 1  #: 0: none until something waits for one
    max: Positive = 1


class Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a stage whose ``replicas`` are :class:`Bounds` gets one worker more, or one less."""

    queue_per_worker: Annotated[float, Meta(gt=0)] = 2.0  #: more tasks than that wait for each worker
    up_s: Seconds = 2.0  #: for so long: one more
    down_s: Seconds = 60.0  #: for so long nothing has waited and a worker had nothing to do: one less
    cooldown_s: Seconds = 10.0  #: between two steps


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage's workers run on."""

    devices: str | list[str] = "auto"  #: "auto", "cpu", "cuda:0", or a list of them
    replicas: Count | Bounds = 1  #: workers that `omni-broker start` keeps alive; 0: only by hand
    scaling: Scaling = Scaling()
    tensor_parallel_size: Positive = 1  #: ranks (devices) of one worker
    threads: Count = 0  #: CPU threads of a worker; 0: the engine's default

    @property
    def least(self) -> int:
        """Workers that are kept alive whatever there is to do."""
        return self.replicas.min if isinstance(self.replicas, Bounds) else self.replicas

    @property
    def most(self) -> int:
        """Workers that are kept alive at most."""
        return self.replicas.max if isinstance(self.replicas, Bounds) else self.replicas


class Retry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a task is tried again."""

    attempts: Positive = 3
    timeout_s: Annotated[float, Meta(gt=0)] = 300.0  #: an attempt that takes longer is killed


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many frames of a streaming edge go into one chunk.

    Windows never cross the end of a segment (a chunk whose field ``segment_end`` is true).
    """

    frames: Positive
    left: Count = 0  #: frames of context repeated before
    right: Count = 0  #: frames of context after (the window waits for them)
    first: Count = 0  #: frames of a segment stream's very first window; 0: same as `frames`
    #: Windows grow, each to twice the new frames of the one before, up to so many; 0: all have `frames`. The
    #: next has time while one is heard, and the longer they are, the less context is computed again.
    largest: Count = 0
    tensor: str = "frames"  #: the payload field that is cut
    axis: int = -1  #: its frame axis


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node: one model, or a part of one, with workers of its own."""

    engine: str  #: a built-in engine's name, or "package.module:Class"
    model: str | None = None  #: catalogue name, Hugging Face id or folder
    #: Run only for requests that carry this input modality ("audio", ...), or one of a list of them
    when: str | list[str] | None = None
    batch: Batch = Batch()
    resources: Resources = Resources()
    retry: Retry = Retry()
    check_finite: bool = True  #: a payload with NaN or infinity fails the request here, by name
    options: dict[str, Any] = {}  #: the engine's own settings (see pipelines/options.py)

    @property
    def waits_for(self) -> list[str]:
        """The input modalities of which one must be there for the stage to run; []: it always runs."""
        return [self.when] if isinstance(self.when, str) else self.when or []


class Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What comes from another host ahead of the job that will read it."""

    window: Positive = 4  #: chunks of the edge that are here, or on their way, and were not read


class EdgeBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the consumer gathers what comes over an edge; what is absent is as its stage's ``batch`` says."""

    accumulate_ms: Annotated[float, Meta(ge=0, le=10_000)] | None = None  #: the stage's ``wait_ms``
    max_batch_size: Positive | None = None


class Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """From a producer to a consumer."""

    from_: str  #: a stage, or "request"
    to: str
    transfer: str | None = None  #: "module:function", a transfer adapter; absent: payloads pass unchanged
    window: Window | None = None
    stream: bool = True  #: false: the consumer starts when the producer has finished
    checkpoint: Literal["none", "memory", "disk"] = "memory"
    #: How tensors come from another host; "shm": the consumer has to be on the producer's; "mooncake": they
    #: go there at once, wherever the consumer is
    transport: Literal["auto", "shm", "zmq", "ucx", "mooncake"] = "auto"
    prefetch: Prefetch = Prefetch()
    batch: EdgeBatch = EdgeBatch()


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an HTTP endpoint uses the graph."""

    input: str = REQUEST  #: the stage that the caller's input stands in for
    outputs: list[str] = []  #: outputs it may ask for, the default first
    # What callers of `images`, `edits` and `videos` may ask for
    max_n: Positive = 10  #: pictures of one call
    max_pixels: Positive = 2048 * 2048  #: of one picture or frame
    max_edge: Positive = 4096  #: its width and its height
    multiple_of: Positive = 16  #: both are multiples of this
    max_steps: Positive = 200  #: `num_inference_steps`
    max_guidance: Annotated[float, Meta(ge=0)] = 100.0  #: `guidance_scale`
    max_partial_images: Annotated[int, Meta(ge=0, le=3)] = 3
    max_frames: Positive = 241  #: of one video
    frame_step: Positive = 4  #: a video has a multiple of this and one frame more
    fps: Annotated[float, Meta(gt=0, le=120)] = 16.0  #: frames a second of a video whose caller names none
    keep_s: Annotated[float, Meta(gt=0)] = 3600.0  #: how long a video is kept after its end


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one pipeline in the broker."""

    max_requests: Positive = 1024  #: accepted and unfinished; more get 429
    #: A task may be ahead of the slowest of its consumers by so much; then it waits
    ahead_chunks: Annotated[int, Meta(ge=4)] = 64
    ahead_mb: Annotated[float, Meta(gt=0)] = 8.0  #: MiB; one chunk always passes


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named directed acyclic graph of stages, with the outputs it can give."""

    name: Name
    outputs: dict[str, str]  #: output modality ("text", "audio", "image", ...) -> stage
    stages: dict[str, Stage]
    edges: list[Edge]
    endpoints: dict[str, Endpoint] = {}
    inputs: list[str] = []  #: what it takes besides text and besides what a stage's `when` names
    description: str = ""
    limits: Limits = Limits()

    def order(self) -> list[str]:
        """Stage names, producers before consumers. The position is the stage's number on the wire.

        Raises ValueError naming the stages of a cycle.
        """
        waiting = {name: {e.from_ for e in self.edges if e.to == name} - {REQUEST} for name in self.stages}
        done: list[str] = []
        while waiting:
            free = [name for name, before in waiting.items() if before <= set(done)]
            if not free:
                raise ValueError(f"cycle through {', '.join(sorted(waiting))}")
            done += free
            for name in free:
                del waiting[name]
        return done

    def takes(self) -> list[str]:
        """What a request may carry besides text: what stages' ``when`` name, and :attr:`inputs`."""
        named = [name for stage in self.stages.values() for name in stage.waits_for]
        return list(dict.fromkeys([*named, *self.inputs]))

    def durable(self, producer: str) -> bool:
        """Whether what a stage (or "request") makes has to be on disk before anybody hears of it.

        So it is when one of its consumers wants that. An output follows all edges of the graph: a request
        that survives would be worth little without it.
        """
        outputs = self.outputs.values()
        return any(
            e.checkpoint == "disk" and (e.from_ == producer or producer in outputs) for e in self.edges
        )

    def stored(self, producer: str) -> bool:
        """Whether what a stage (or "request") makes goes to Mooncake instead of its host's shared memory.

        So it is when one of its consumers wants that: a tensor lies in one place for all of them.
        """
        return any(e.transport == "mooncake" and e.from_ == producer for e in self.edges)

    def kept(self, producer: str) -> dict[str, bool]:
        """Both of these, as :func:`adapters.chunk.pack_wait` wants them."""
        return {"durable": self.durable(producer), "stored": self.stored(producer)}

    def with_checkpoint(self, checkpoint: Literal["none", "memory", "disk"]) -> Pipeline:
        """The same with this setting on all edges."""
        edges = [msgspec.structs.replace(edge, checkpoint=checkpoint) for edge in self.edges]
        return msgspec.structs.replace(self, edges=edges)

    def into(self, stage: str) -> list[tuple[int, Edge]]:
        """The edges that end in a stage, with their numbers on the wire (positions in ``edges``)."""
        return [(i, e) for i, e in enumerate(self.edges) if e.to == stage]

    def batching(self, stage: str) -> Stage:
        """A stage with the batching that the edges into it ask for (:mod:`pipelines.checks`: they agree)."""
        spec = self.stages[stage]
        for _, edge in self.into(stage):
            batch = spec.batch
            if edge.batch.accumulate_ms is not None:
                batch = msgspec.structs.replace(batch, wait_ms=edge.batch.accumulate_ms)
            if edge.batch.max_batch_size is not None:
                batch = msgspec.structs.replace(batch, max_batch_size=edge.batch.max_batch_size)
            spec = msgspec.structs.replace(spec, batch=batch)
        return spec

    def needed(self, outputs: list[str], given: set[str], has: set[str]) -> list[str]:
        """The stages a request runs, in order: what its outputs descend from, less what it brings along.

        Args:
            outputs: Names of outputs, keys of :attr:`outputs`.
            given: Producers ("request", or a stage) whose output the caller supplies.
            has: Input modalities the request carries; stages whose ``when`` names none of them are left out.
        """
        needed: set[str] = set()
        todo = [self.outputs[name] for name in outputs]
        while todo:
            name = todo.pop()
            if name == REQUEST or name in given or name in needed:
                continue
            waits_for = self.stages[name].waits_for
            if waits_for and has.isdisjoint(waits_for):
                continue
            needed.add(name)
            todo += [e.from_ for _, e in self.into(name)]
        return [name for name in self.order() if name in needed]
