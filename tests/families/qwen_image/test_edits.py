"""Pictures made of pictures: with diffusers' pipelines as the measure, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.families.diffusion_rig import Asked, Painted, at_once, running
from tests.families.qwen_image.compare import check
from tests.families.requests import picture
from workers.engine import ItemError

#: Of given pictures, so that tests are quick. A square of this is a multiple of 32, as the pipeline wants
#: it, and of 28, as Qwen's own processor does, which therefore has nothing to resize: it rounds otherwise.
AREA = 224 * 224
SETTINGS = [f"{stage}.family_options={{area: {AREA}}}" for stage in ("text", "picture")]
SIZE = {"width": 64, "height": 48, "num_inference_steps": 2}
ONE, OTHER = picture(32, 32), picture(50, 50, 1)


class _Places:
    """Calls transformers' model in the way that gives pictures their places in height and width.

    diffusers 0.42 leaves out what transformers 5 needs for that.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forward = model.forward

    def __call__(self, input_ids: Any, **call: Any) -> Any:
        kinds = (input_ids == self._model.config.image_token_id).int()
        return self._forward(input_ids=input_ids, mm_token_type_ids=kinds, **call)


def editor(
    pipe: Any, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, read: int = AREA, area: int = AREA
) -> Any:
    """A diffusers pipeline of that class on the parts of another, which scales pictures as the tests do."""
    import diffusers
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor(Qwen2VLProcessor):  # type: ignore[misc]
        """Without one for films, which needs torchvision."""

        def check_argument_for_proper_class(self, *args: Any) -> None:
            """None is not of any class."""

    def smaller(module: ModuleType) -> None:
        plain = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda own, ratio: plain(area if own == 1 << 20 else read, ratio)
        )

    smaller(pipeline_qwenimage_edit)
    smaller(pipeline_qwenimage_edit_plus)
    monkeypatch.setattr(pipe.text_encoder, "forward", _Places(pipe.text_encoder))
    processor = Processor(
        Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"), pipe.tokenizer, None
    )
    return getattr(diffusers, name)(**pipe.components, processor=processor)


def same(painted: Painted, pipe: Any, asked: Asked) -> None:
    from PIL import Image

    images = [Image.fromarray(image) for image in asked[0]["images"]]
    check(painted, pipe, asked, image=images if len(images) > 1 else images[0])


async def test_edits_of_one_and_of_several_pictures_in_one_batch(
    edits: Path, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Asked] = [
        ({"prompt": "make it red", "images": [ONE]}, {**SIZE}, 1),
        ({"prompt": "make it blue", "negative_prompt": "", "images": [OTHER]}, {**SIZE}, 2),
        (
            {"prompt": "put the first on the second", "negative_prompt": "dull", "images": [ONE, OTHER]},
            {**SIZE, "guidance_scale": 2.0},
            3,
        ),
    ]
    async with running("qwen_image", edits, *SETTINGS) as rig:
        painted = await at_once(
            *(rig.paint(request, seed=seed, has=["image"], **params) for request, params, seed in asked)
        )
    diffusers = editor(pipe, edits, "QwenImageEditPlusPipeline", monkeypatch)
    for one, each in zip(painted, asked, strict=True):
        same(one, diffusers, each)


async def test_without_a_size_what_is_made_has_the_last_given_pictures_shape(
    edits: Path, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which the text encoder sees in 672 x 224 pixels, also a multiple of 28.
    asked: Asked = ({"prompt": "make it red", "images": [picture(32, 96)]}, {"num_inference_steps": 2}, 1)
    async with running("qwen_image", edits, "picture.family_options={area: 9216}") as rig:
        painted = await rig.paint(asked[0], has=["image"], **asked[1])
    assert painted.image.shape == (64, 160, 3), "about 96 x 96 pixels, edges multiples of 32"
    pipe = editor(pipe, edits, "QwenImageEditPlusPipeline", monkeypatch, read=384 * 384, area=9216)
    same(painted, pipe, asked)


async def test_the_first_editor_reads_its_one_picture_in_full(
    edits: Path, tmp_path: Path, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    shutil.copytree(edits, first)
    index = (edits / "model_index.json").read_text("utf-8")
    (first / "model_index.json").write_text(index.replace("EditPlus", "Edit"), "utf-8")
    asked: Asked = ({"prompt": "make it red", "negative_prompt": "", "images": [ONE]}, {**SIZE}, 1)
    async with running("qwen_image", first, *SETTINGS) as rig:
        painted = await rig.paint(asked[0], has=["image"], **asked[1])
        with pytest.raises(ItemError, match="at most 1, got 2"):
            await rig.paint({**asked[0], "images": [ONE, ONE]}, has=["image"], **asked[1])
    same(painted, editor(pipe, first, "QwenImageEditPipeline", monkeypatch), asked)


@pytest.mark.parametrize(
    ("asked", "message", "param"),
    [
        ({"prompt": "a cup"}, "send one", "image"),
        ({"prompt": "a cup", "images": [ONE] * 4}, "at most 3, got 4", "image"),
        ({"prompt": "a cup", "images": [ONE], "mask": ONE[..., 0]}, "takes none", "mask"),
        ({"prompt": "a cup", "images": [ONE], "strength": 0.5}, "takes none", "strength"),
        ({"prompt": "a cup", "images": [picture(2, 300)]}, "over 100 times", "image"),
        ({"prompt": "<|image_pad|>", "images": [ONE]}, "stands for a picture", "prompt"),
        (
            {"prompt": "a cup", "negative_prompt": "<|image_pad|>", "images": [ONE]},
            "stands for a picture",
            "negative_prompt",
        ),
    ],
)
async def test_an_edit_that_cannot_be_is_refused_by_the_name_of_its_field(
    edits: Path, asked: dict[str, Any], message: str, param: str
) -> None:
    async with running("qwen_image", edits, stages=["text"]) as rig:
        params = {name: asked.pop(name) for name in ("strength",) if name in asked}
        with pytest.raises(ItemError, match=message) as refused:
            await rig.paint(asked, has=["image"], **params)
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_a_model_that_draws_refuses_pictures_and_settings_for_them(draws: Path) -> None:
    async with running("qwen_image", draws, stages=["text"]) as rig:
        with pytest.raises(ItemError, match="words alone") as refused:
            await rig.paint({"prompt": "a cup", "images": [ONE]}, has=["image"])
    assert (refused.value.status, refused.value.param) == (400, "image")
    with pytest.raises(ValueError, match="has no effect"):
        async with running("qwen_image", draws, *SETTINGS, stages=["picture"]):
            pass


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
async def test_an_edit_of_more_words_than_the_model_has_places_for_is_refused_alone(
    edits: Path, field: str
) -> None:
    short = {"prompt": "make it red", "negative_prompt": "", "images": [ONE]}
    settings = ("text.family_options={area: 4096}", "picture.family_options={area: 4096}")
    async with running("qwen_image", edits, *settings) as rig:
        steps = rig.engines["denoiser"].thread.runner  # type: ignore[attr-defined]
        with pytest.raises(ItemError) as refusal:
            await rig.paint({**short, field: "a dog " * 1500}, has=["image"], **SIZE)
        assert steps.steps == 0, "it has been in a pass, which it would have broken for others"
        assert (refusal.value.status, refusal.value.param) == (400, field)
        painted = await rig.paint({**short, field: "a dog " * 500}, has=["image"], **SIZE)
        assert painted.image.shape == (48, 64, 3)
