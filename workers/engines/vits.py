"""What both halves of a VITS voice need: the voice's folder and ONNX Runtime sessions."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelines import models
from pipelines.graph import Stage
from workers.engine import ItemError
from workers.optional import library

log = logging.getLogger("worker")


class Inference(msgspec.Struct, frozen=True):
    """How a voice was meant to be used."""

    noise_scale: float = 0.667
    length_scale: float = 1.0
    noise_w: float = 0.8


class Audio(msgspec.Struct, frozen=True):
    """What a voice sounds like."""

    sample_rate: int


class Espeak(msgspec.Struct, frozen=True):
    """Which of espeak-ng's voices turns text into phonemes."""

    voice: str


class Voice(msgspec.Struct, frozen=True):
    """A voice's settings, as :mod:`pipelines.convert.piper` leaves them."""

    name: str
    audio: Audio
    espeak: Espeak
    phoneme_id_map: dict[str, list[int]]
    hop: int  #: samples a frame
    channels: int  #: rows of the frames
    inference: Inference = Inference()
    phoneme_type: str = "espeak"


def open_voice(stage: Stage) -> tuple[Path, Voice]:
    """The folder and settings of a stage's model, which is pulled if it isn't there.

    Raises ValueError for a folder that holds no converted voice.
    """
    folder = models.ensure(stage.model or "")
    file = folder / "voice.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no converted voice (voice.json is missing); "
            f"make one: python -m pipelines.convert piper {folder} TARGET"
        )
    voice = msgspec.convert(json.loads(file.read_text("utf-8")), Voice)
    if voice.phoneme_type != "espeak":
        raise ValueError(f"{file}: phoneme_type is {voice.phoneme_type!r}; only 'espeak' is known")
    return folder, voice


def open_session(file: Path, stage: Stage, device: str) -> Any:
    """An ``onnxruntime.InferenceSession`` on the device, with the stage's number of threads."""
    onnxruntime = library("onnxruntime", "speech")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = stage.resources.threads
    options.inter_op_num_threads = 1
    # Idle threads sleep at once: other stages want the cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.startswith("cuda"):
        if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
            number = int(device.partition(":")[2] or 0)
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": number, "use_tf32": 0}))
        else:
            log.warning("this onnxruntime has no CUDA (onnxruntime-gpu has); %s runs on the CPU", file.name)
    return onnxruntime.InferenceSession(str(file), options, providers=providers)


def finite(array: NDArray[np.float32]) -> NDArray[np.float32] | Exception:
    """The array, or the error of a model that has gone wrong."""
    if np.isfinite(array).all():
        return array
    return ItemError("the model's output holds NaN or infinity")
