"""A Piper voice, cut into its acoustic half and its decoder, with all randomness as inputs.

A Piper voice is a VITS model in one ONNX graph. Its text encoder, duration predictor and flow give latent
frames z; a HiFi-GAN decoder turns 256 samples out of each frame. The two halves are separate stages here, so
the voice is cut at z.

The graph draws its noise itself, by two RandomNormalLike nodes, whose values depend on whatever ran before.
As inputs they make a voice repeat itself from a seed. The second node's length is only known once the
durations are, so that input may have any length, and is used over and over from its start.

    acoustic.onnx   ids int64 [batch, ids], lengths int64 [batch], scales float32 [3] (noise, length, width),
                    duration_noise float32 [batch, 2, ids], frame_noise float32 [batch, channels, any]
                    -> z float32 [batch, channels, frames], frames int64 [batch]
    decoder.onnx    z float32 [batch, channels, frames] -> audio float32 [batch, 1, 1, samples]
    voice.json      the voice's own settings file, with ``name``, ``hop`` and ``channels`` added
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

#: The tensor between the two halves, in every voice of Piper's exporter.
BORDER = "/Mul_7_output_0"
FRAMES = "/Cast_output_0"  #: each item's length in frames, before padding to the longest

NOISES = ("duration_noise", "frame_noise")
RENAMED = {"input": "ids", "input_lengths": "lengths", BORDER: "z", FRAMES: "frames", "output": "audio"}


def convert(source: Path, target: Path) -> None:
    """Cuts the voice in ``source``, a tree with one .onnx file and its .onnx.json, into two models.

    The folder ``target`` is created. Needs the extra ``speech``. Raises ValueError if it is no Piper voice.
    """
    import onnx

    file = _find(source)
    settings = json.loads(file.with_name(file.name + ".json").read_text("utf-8"))
    model = onnx.load(str(file))
    names = {output for node in model.graph.node for output in node.output}
    if not {BORDER, FRAMES} <= names:
        raise ValueError(f"{file.name} is no Piper voice: its graph lacks {BORDER} or {FRAMES}")
    if settings.get("num_speakers", 1) != 1:
        raise ValueError(
            f"{file.name} has {settings['num_speakers']} speakers; only voices with one are known"
        )
    channels = _channels(model.graph)
    decoder = _cut(onnx, model, [BORDER], ["output"], channels)
    _draw_outside(onnx, model.graph)
    acoustic = _cut(onnx, model, ["input", "input_lengths", "scales", *NOISES], [BORDER, FRAMES], channels)

    target.mkdir(parents=True, exist_ok=True)
    onnx.save(acoustic, str(target / "acoustic.onnx"))
    onnx.save(decoder, str(target / "decoder.onnx"))
    settings |= {"name": _voice_name(file), "hop": _hop(decoder.graph), "channels": channels}
    for card in source.rglob("MODEL_CARD"):
        shutil.copy(card, target)
    (target / "voice.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1), "utf-8")


def _find(source: Path) -> Path:
    files = sorted(source.rglob("*.onnx"))
    if len(files) != 1 or not files[0].with_name(files[0].name + ".json").is_file():
        raise ValueError(f"{source} holds {len(files)} .onnx files, not one with its .onnx.json beside it")
    return files[0]


def _voice_name(file: Path) -> str:
    """ "joe" for en_US-joe-medium.onnx."""
    parts = file.stem.split("-")
    return parts[1] if len(parts) == 3 else file.stem


def _channels(graph: Any) -> int:
    """Rows of z: the input channels of the decoder's first convolution."""
    weight = next(node.input[1] for node in graph.node if node.op_type == "Conv" and node.input[0] == BORDER)
    return int(next(item.dims[1] for item in graph.initializer if item.name == weight))


def _hop(graph: Any) -> int:
    """Samples a frame: the product of the upsampling layers' strides."""
    hop = 1
    for node in graph.node:
        if node.op_type == "ConvTranspose":
            hop *= next(a.ints[0] for a in node.attribute if a.name == "strides")
    return hop


def _draw_outside(onnx: Any, graph: Any) -> None:
    """Puts inputs in the place of the two nodes that draw noise."""
    durations, frames = (node for node in graph.node if node.op_type == "RandomNormalLike")
    if not durations.name.startswith("/dp/"):
        durations, frames = frames, durations
    make = onnx.helper.make_node
    instead = {
        durations.name: [make("Identity", [NOISES[0]], list(durations.output))],
        frames.name: _cycled(make, frames.input[0], frames.output[0]),
    }
    rebuilt = [new for node in graph.node for new in instead.get(node.name, [node])]
    del graph.node[:]
    graph.node.extend(rebuilt)
    for name in NOISES:
        graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 3))
    graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value, np.int64), f"noise/{name}")
        for name, value in (("zero", 0), ("one", 1), ("axis", 2))
    )


def _cycled(make: Any, like: str, output: str) -> list[Any]:
    """The input noise, repeated or cut to as many frames as the tensor ``like`` has."""
    noise = NOISES[1]
    return [
        make("Shape", [like], ["noise/like"]),
        make("Gather", ["noise/like", "noise/axis"], ["noise/frames"]),
        make("Range", ["noise/zero", "noise/frames", "noise/one"], ["noise/range"]),
        make("Shape", [noise], ["noise/shape"]),
        make("Gather", ["noise/shape", "noise/axis"], ["noise/length"]),
        make("Mod", ["noise/range", "noise/length"], ["noise/index"]),
        make("Gather", [noise, "noise/index"], [output], axis=2),
    ]


def _cut(onnx: Any, model: Any, inputs: list[str], outputs: list[str], channels: int) -> Any:
    """The part of a graph between some tensors, under plain names and with free batch and length axes."""
    part = onnx.utils.Extractor(model).extract_model(inputs, outputs)
    graph = part.graph
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [RENAMED.get(name, name) for name in names]
    shapes: dict[str, list[str | int]] = {
        "ids": ["batch", "ids"],
        "lengths": ["batch"],
        "scales": [3],
        "duration_noise": ["batch", 2, "ids"],
        "frame_noise": ["batch", channels, "noise"],
        "z": ["batch", channels, "frames"],
        "frames": ["batch"],
        "audio": ["batch", 1, 1, "samples"],
    }
    for infos, wanted in ((graph.input, inputs), (graph.output, outputs)):
        del infos[:]
        for name in (RENAMED.get(name, name) for name in wanted):
            whole = name in ("ids", "lengths", "frames")
            kind = onnx.TensorProto.INT64 if whole else onnx.TensorProto.FLOAT
            infos.append(onnx.helper.make_tensor_value_info(name, kind, shapes[name]))
    del graph.value_info[:]
    onnx.checker.check_model(part)
    return part
