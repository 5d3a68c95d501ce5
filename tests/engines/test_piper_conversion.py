"""Cutting a Piper voice: the halves together are the whole, and what is no voice is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines import models
from pipelines.convert.piper import convert
from workers.optional import library

onnx = pytest.importorskip("onnx")


def test_a_folder_without_a_voice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 0"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "a.onnx").touch()
    with pytest.raises(ValueError, match="not one"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_graph_that_is_no_piper_voice_is_refused(tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [info], [out])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "a.onnx"))
    (tmp_path / "a.onnx.json").write_text("{}")
    with pytest.raises(ValueError, match="no Piper voice"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.models
def test_the_halves_have_plain_inputs_and_no_randomness() -> None:
    folder = models.ensure("piper-en-us-joe")
    acoustic, decoder = (onnx.load(str(folder / f"{name}.onnx")).graph for name in ("acoustic", "decoder"))
    assert [value.name for value in acoustic.input] == [
        "ids",
        "lengths",
        "scales",
        "duration_noise",
        "frame_noise",
    ]
    assert [value.name for value in acoustic.output] == ["z", "frames"]
    assert ([value.name for value in decoder.input], [value.name for value in decoder.output]) == (
        ["z"],
        ["audio"],
    )
    assert not any("Random" in node.op_type for graph in (acoustic, decoder) for node in graph.node)
    settings = json.loads((folder / "voice.json").read_text("utf-8"))
    assert (settings["name"], settings["hop"], settings["channels"]) == ("joe", 256, 192)
    assert (folder / "MODEL_CARD").is_file()


@pytest.mark.models
def test_frame_noise_is_used_over_and_over_when_it_is_short() -> None:
    onnxruntime = library("onnxruntime", "speech")
    folder = models.ensure("piper-en-us-joe")
    session = onnxruntime.InferenceSession(str(folder / "acoustic.onnx"))
    ids = np.array([[1, 0, 20, 0, 59, 0, 24, 0, 100, 0, 2]], np.int64)
    noise = np.random.default_rng(1).standard_normal((1, 192, 5), np.float32)

    def frames(noise: np.ndarray) -> np.ndarray:
        values = {
            "ids": ids,
            "lengths": np.array([ids.shape[1]]),
            "scales": np.array([0.667, 1.0, 0.8], np.float32),
            "duration_noise": np.zeros((1, 2, ids.shape[1]), np.float32),
            "frame_noise": noise,
        }
        z, count = session.run(None, values)
        assert z.shape == (1, 192, count[0])
        return np.asarray(z)

    short = frames(noise)
    assert short.shape[2] > 5
    assert np.array_equal(short, frames(np.tile(noise, (1, 1, 40))))
