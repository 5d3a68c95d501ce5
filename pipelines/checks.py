"""What must hold in a pipeline beyond the types of its fields. Each check names the key it is about."""

from __future__ import annotations

import re
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

import msgspec

from pipelines import catalog
from pipelines.decode import decode
from pipelines.errors import ModelError, PipelineError, choices
from pipelines.graph import REQUEST, Edge, EdgeBatch, Endpoint, Pipeline, Stage
from pipelines.options import ENGINES, EngineInfo

#: The endpoints of the gateway that a pipeline can serve.
ENDPOINTS = ("chat", "speech", "transcriptions", "images", "edits", "videos")
#: What some of them give, and the bounds (fields of :class:`Endpoint`) that mean something there.
MAKES = {"images": "image", "edits": "image", "videos": "video"}
_BOTH = ("max_pixels", "max_edge", "multiple_of", "max_steps", "max_guidance")
_PICTURES = (*_BOTH, "max_n", "max_partial_images")
_FILMS = (*_BOTH, "max_frames", "frame_step", "fps", "keep_s")
BOUNDS = {"images": _PICTURES, "edits": _PICTURES, "videos": _FILMS}
#: The input modalities that a stage's ``when`` and a pipeline's ``inputs`` can name.
MODALITIES = ("audio", "image", "video")

_IN_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


def check(pipeline: Pipeline) -> None:
    """Raises :class:`PipelineError` at the first thing that can't work."""
    if not pipeline.stages:
        raise PipelineError("a pipeline needs at least one stage", key="stages")
    if not pipeline.outputs:
        raise PipelineError("a pipeline needs at least one output", key="outputs")
    for name, stage in pipeline.stages.items():
        _check_name(name)
        _check_stage(stage, f"stages.{name}")
    for number, edge in enumerate(pipeline.edges):
        _check_edge(edge, f"edges[{number}]", pipeline)
    _check_twice(pipeline.edges)
    _check_batches(pipeline)
    for output, name in pipeline.outputs.items():
        if name not in pipeline.stages:
            raise PipelineError(
                f"no stage {name!r}; {choices(name, pipeline.stages)}", key=f"outputs.{output}"
            )
    _check_modalities(pipeline.inputs, "inputs")
    _check_cycle(pipeline)
    _check_connected(pipeline)
    for name, endpoint in pipeline.endpoints.items():
        if name not in ENDPOINTS:
            raise PipelineError(f"no such endpoint; {choices(name, ENDPOINTS)}", key=f"endpoints.{name}")
        _check_endpoint(endpoint, f"endpoints.{name}", pipeline)
        _check_drawing(name, endpoint, pipeline)


def _check_name(name: str) -> None:
    key = f"stages.{name}"
    if name == REQUEST:
        raise PipelineError(f"{REQUEST!r} stands for what the caller sent; name the stage otherwise", key=key)
    if not _STAGE_NAME.fullmatch(name):
        raise PipelineError(
            "a stage's name begins with a small letter and has at most 64 of a-z, 0-9, _ and -", key=key
        )


def _check_stage(stage: Stage, key: str) -> None:
    """One stage by itself."""
    info = ENGINES.get(stage.engine)
    if info is None and not _IN_MODULE.fullmatch(stage.engine):
        allowed = choices(stage.engine, ENGINES)
        raise PipelineError(f'no engine {stage.engine!r}; {allowed}, or "module:Class"', key=f"{key}.engine")
    if info is not None:
        _check_settings(stage, info, key)
    if stage.model is not None:
        try:
            catalog.kind(stage.model)
        except ModelError as error:
            raise PipelineError(str(error), key=f"{key}.model") from None
    if stage.when == []:
        raise PipelineError("an empty list; leave the key out to have it run always", key=f"{key}.when")
    _check_modalities(stage.waits_for, f"{key}.when")
    _check_replicas(stage, f"{key}.resources.replicas")
    _check_devices(stage, f"{key}.resources")


def _check_modalities(names: list[str], key: str) -> None:
    for name in names:
        if name not in MODALITIES:
            raise PipelineError(f"{name!r} is no input modality; {choices(name, MODALITIES)}", key=key)


def _check_settings(stage: Stage, info: EngineInfo, key: str) -> None:
    """A built-in engine gets the settings that it knows, and none that it would ignore."""
    decode(stage.options, info.options, f"{key}.options")
    if info.model and stage.model is None:
        raise PipelineError(
            f"the engine {stage.engine} needs a model: a catalogue name, a Hugging Face id or a folder",
            key=f"{key}.model",
        )
    if not info.model and stage.model is not None:
        raise PipelineError(f"the engine {stage.engine} takes no model", key=f"{key}.model")
    ranks, most = stage.resources.tensor_parallel_size, _most_ranks(stage)
    if most is not None and ranks > most:
        devices = "one device" if most == 1 else f"{most} devices"
        raise PipelineError(
            f"the engine {stage.engine} runs on {devices}", key=f"{key}.resources.tensor_parallel_size"
        )


def _most_ranks(stage: Stage) -> int | None:
    """Devices of one worker that its engine can use; None: any number."""
    if stage.engine == "diffusion" and stage.options.get("cfg") == "parallel":
        return 2
    return None if stage.engine == "vllm" else 1


def _check_replicas(stage: Stage, key: str) -> None:
    least, most = stage.resources.least, stage.resources.most
    if least > most:
        raise PipelineError(f"min {least} is more than max {most}", key=f"{key}.min")


def _check_devices(stage: Stage, key: str) -> None:
    resources = stage.resources
    if resources.devices == "auto":
        return
    devices = [resources.devices] if isinstance(resources.devices, str) else resources.devices
    if not devices:
        raise PipelineError("an empty list; leave the key out for auto", key=f"{key}.devices")
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise PipelineError(
                f'{device!r} is no device; allowed: "auto", "cpu", "cuda:N", or a list of them',
                key=f"{key}.devices",
            )
    if resources.tensor_parallel_size > len(devices):
        raise PipelineError(
            f"{resources.tensor_parallel_size} ranks, but devices lists only {len(devices)}",
            key=f"{key}.tensor_parallel_size",
        )


def _check_edge(edge: Edge, key: str, pipeline: Pipeline) -> None:
    producers = [REQUEST, *pipeline.stages]
    if edge.from_ not in producers:
        raise PipelineError(f"no stage {edge.from_!r}; {choices(edge.from_, producers)}", key=f"{key}.from")
    if edge.to not in pipeline.stages:
        raise PipelineError(f"no stage {edge.to!r}; {choices(edge.to, pipeline.stages)}", key=f"{key}.to")
    if edge.from_ == edge.to:
        raise PipelineError(f"the stage {edge.to} can't feed itself", key=key)
    if edge.transfer is not None and not _IN_MODULE.fullmatch(edge.transfer):
        raise PipelineError(f'{edge.transfer!r}: expected "package.module:function"', key=f"{key}.transfer")
    if edge.window is not None and 0 < edge.window.largest < edge.window.frames:
        raise PipelineError(
            f"{edge.window.largest} is less than the window's frames, {edge.window.frames}",
            key=f"{key}.window.largest",
        )


def _check_twice(edges: Iterable[Edge]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for number, edge in enumerate(edges):
        first = seen.setdefault((edge.from_, edge.to), number)
        if first != number:
            raise PipelineError(
                f"the edge from {edge.from_} to {edge.to} is already there as edges[{first}]",
                key=f"edges[{number}]",
            )


def _check_batches(pipeline: Pipeline) -> None:
    """Jobs of one stage share its passes, so the edges into it can't ask for different ones."""
    for stage in pipeline.stages:
        for field in EdgeBatch.__struct_fields__:
            said = [(n, edge) for n, edge in pipeline.into(stage) if getattr(edge.batch, field) is not None]
            for number, edge in said[1:]:
                first, value = said[0], getattr(edge.batch, field)
                if value != getattr(first[1].batch, field):
                    raise PipelineError(
                        f"{value:g}, but the edge from {first[1].from_} to {stage} (edges[{first[0]}]) says "
                        f"{getattr(first[1].batch, field):g}; {stage} batches all its jobs alike",
                        key=f"edges[{number}].batch.{field}",
                    )


def _check_cycle(pipeline: Pipeline) -> None:
    sorter = TopologicalSorter({name: [e.from_ for _, e in pipeline.into(name)] for name in pipeline.stages})
    try:
        sorter.prepare()
    except CycleError as error:
        raise PipelineError(f"a cycle: {' -> '.join(error.args[1])}", key="edges") from None


def _check_connected(pipeline: Pipeline) -> None:
    feeding = {edge.from_ for edge in pipeline.edges}
    for name in pipeline.stages:
        if not pipeline.into(name):
            raise PipelineError(
                f"nothing reaches this stage; add an edge like {{from: {REQUEST}, to: {name}}}",
                key=f"stages.{name}",
            )
        if name not in feeding and name not in pipeline.outputs.values():
            raise PipelineError(
                "no stage consumes what this one makes, and it is no output; add an edge or an output",
                key=f"stages.{name}",
            )


def _check_endpoint(endpoint: Endpoint, key: str, pipeline: Pipeline) -> None:
    producers = [REQUEST, *pipeline.stages]
    if endpoint.input not in producers:
        raise PipelineError(
            f"no stage {endpoint.input!r}; {choices(endpoint.input, producers)}", key=f"{key}.input"
        )
    if not endpoint.outputs:
        raise PipelineError(
            f"an endpoint needs outputs; there are {', '.join(pipeline.outputs)}", key=f"{key}.outputs"
        )
    for number, output in enumerate(endpoint.outputs):
        if output not in pipeline.outputs:
            allowed = choices(output, pipeline.outputs)
            raise PipelineError(f"no output {output!r}; {allowed}", key=f"{key}.outputs[{number}]")
        _check_reachable(endpoint.input, output, f"{key}.outputs[{number}]", pipeline)


def _check_drawing(name: str, endpoint: Endpoint, pipeline: Pipeline) -> None:
    """Pictures and videos: they are there to be asked for, and no bound is set that means nothing."""
    key, output = f"endpoints.{name}", MAKES.get(name)
    if output is not None and output not in endpoint.outputs:
        raise PipelineError(f"{name} needs the output {output}", key=f"{key}.outputs")
    if name == "edits" and "image" not in pipeline.takes():
        raise PipelineError("edits need pictures to come in; add inputs: [image]", key=key)
    for field in msgspec.structs.fields(Endpoint)[2:]:
        if field.name not in BOUNDS.get(name, ()) and getattr(endpoint, field.name) != field.default:
            raise PipelineError(f"means nothing to {name}", key=f"{key}.{field.name}")


def _check_reachable(source: str, output: str, key: str, pipeline: Pipeline) -> None:
    """What the endpoint's caller supplies must be enough to make the output."""
    needed = pipeline.needed([output], {source}, set(MODALITIES))
    if not needed:
        raise PipelineError(f"the output {output} is the endpoint's own input {source}", key=key)
    for name in needed:
        if source != REQUEST and any(edge.from_ == REQUEST for _, edge in pipeline.into(name)):
            raise PipelineError(
                f"the output {output} needs the stage {name}, which needs the caller's {REQUEST}, "
                f"but this endpoint's input is {source}",
                key=key,
            )


def check_local_devices(pipeline: Pipeline, present: int) -> None:
    """Raises :class:`PipelineError` for a stage on a GPU that this machine lacks; it has ``present``."""
    for name, stage in pipeline.stages.items():
        listed = stage.resources.devices
        for device in [listed] if isinstance(listed, str) else listed:
            index = device.partition(":")[2] or "0"
            if device.startswith("cuda") and int(index) >= present:
                raise PipelineError(
                    f"{device!r} is not on this machine, which has {present} GPUs",
                    key=f"stages.{name}.resources.devices",
                )
