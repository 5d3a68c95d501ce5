"""What the stages make of a request is what diffusers makes of it alone, on the same weights and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.chunk import Payload
from tests.families.diffusion_rig import assert_same, at_once, reference, running
from workers.engine import ItemError

SMALL = ("thinker.kv_cache_gib=0.05", "thinker.block_size=16")
GREEDY = {"temperature": 0.0}
SQUARE = {"width": 64, "height": 64}
#: Requests that share nothing but their time: words in one, two and no quotation marks, sizes, steps,
#: guidance, seeds.
REQUESTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"prompt": "a sign: 'hello', and \"no way\""}, {**SQUARE, "num_inference_steps": 4}, 1),
    ({"prompt": "\u300cone\u300d"}, {**SQUARE, "num_inference_steps": 3, "guidance_scale": 3.0}, 2),
    ({"prompt": "a dog"}, {"width": 96, "height": 64, "num_inference_steps": 1}, 3),
    ({"prompt": "a dog"}, {**SQUARE, "num_inference_steps": 2, "guidance_scale": 1.0}, 4),
]
PICTURES = [
    np.random.default_rng(number).integers(0, 255, (64, 96, 3), dtype=np.uint8) for number in range(2)
]
#: Of one picture, in its size and in another; of two pictures, not guided.
EDITS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"prompt": "a 'dog'", "images": PICTURES[:1]}, {"num_inference_steps": 3}, 5),
    ({"prompt": "a dog", "images": PICTURES[1:]}, {**SQUARE, "num_inference_steps": 2}, 6),
    ({"prompt": "a", "images": PICTURES}, {**SQUARE, "num_inference_steps": 2, "guidance_scale": 1.0}, 7),
]


def codes_of(payloads: list[Payload]) -> list[int]:
    """All that the language model wrote."""
    return [code for payload in payloads for code in payload["codes"]]


async def test_unequal_requests_in_one_batch_are_what_each_is_alone(checkpoint: Path, pipe: Any) -> None:
    async with running("glm_image", checkpoint, *SMALL) as rig:
        painted = await at_once(
            *(rig.paint(request, seed=seed, **GREEDY, **params) for request, params, seed in REQUESTS)
        )
    assert len({tuple(codes_of(one.made["thinker"])) for one in painted}) == 4
    for one, (request, params, seed) in zip(painted, REQUESTS, strict=True):
        assert_same(one, reference(pipe, seed=seed, **request, **params))


async def test_edits_in_one_batch_with_others_are_what_each_is_alone(checkpoint: Path, pipe: Any) -> None:
    from PIL import Image

    requests = [*EDITS, REQUESTS[1]]
    async with running("glm_image", checkpoint, *SMALL) as rig:
        painted = await at_once(
            *(
                rig.paint(
                    request, seed=seed, has=["image"] if "images" in request else [], **GREEDY, **params
                )
                for request, params, seed in requests
            )
        )
    for one, (request, params, seed) in zip(painted, requests, strict=True):
        pictures = [Image.fromarray(image) for image in request.get("images", [])]
        size = {} if "width" in params else {"height": 64, "width": 96}
        call = {"prompt": request["prompt"], "image": pictures or None, **size, **params}
        assert_same(one, reference(pipe, seed=seed, **call))


async def test_a_given_picture_is_looked_at_beside_the_cache(checkpoint: Path, pipe: Any) -> None:
    from PIL import Image

    pytest.importorskip("cache_dit")
    request, params, seed = EDITS[1]
    settings = ("denoiser.cache=dbcache", "denoiser.cache_threshold=0")
    async with running("glm_image", checkpoint, *SMALL, *settings) as rig:
        for _ in range(2):
            painted = await rig.paint(request, seed=seed, has=["image"], **GREEDY, **params)
        denoiser = rig.engines["denoiser"].thread.runner.denoiser
        weights = {id(weight) for weight in denoiser.transformers[0].parameters()}
        assert {id(weight) for weight in denoiser._looking.parameters()} == weights  # no second copy
    picture = Image.fromarray(request["images"][0])
    assert_same(painted, reference(pipe, seed=seed, prompt=request["prompt"], image=[picture], **params))


async def test_codes_are_drawn_by_the_seed_and_the_picture_is_theirs(checkpoint: Path, pipe: Any) -> None:
    import torch

    request, params = {"prompt": "a dog"}, {**SQUARE, "num_inference_steps": 2}
    async with running("glm_image", checkpoint, *SMALL) as rig:
        one, again, other = await at_once(*(rig.paint(request, seed=seed, **params) for seed in (1, 1, 2)))
    codes = codes_of(one.made["thinker"])
    assert codes == codes_of(again.made["thinker"]) != codes_of(other.made["thinker"])
    large = torch.tensor(codes[-4:]).view(1, 2, 2)
    prior = large.repeat_interleave(2, 1).repeat_interleave(2, 2).view(1, -1)
    assert_same(one, reference(pipe, seed=1, prior_token_ids=prior, **request, **params))


async def test_engines_that_die_on_the_way_change_nothing(checkpoint: Path) -> None:
    request, params = {"prompt": "a 'dog'"}, {**SQUARE, "num_inference_steps": 4}
    async with running("glm_image", checkpoint, *SMALL, "denoiser.checkpoint_steps=1") as rig:
        whole = await rig.paint(request, seed=1, **params)
        written = whole.made["thinker"]
        rest = await rig.stage(
            "thinker", whole.made, 1, params, attempt=2, emitted=2, resumed=[dict(one) for one in written[:2]]
        )
        assert len(written) > 3
        assert codes_of(written[:2] + rest) == codes_of(written)
        again = await rig.broken("denoiser", whole.made, 1, params, when=lambda _, states: len(states) == 2)
        np.testing.assert_array_equal(again[-1]["latents"], whole.latents)


def test_codes_stand_where_the_model_was_taught_that_they_stand(pipe: Any) -> None:
    import torch

    from workers.families.glm_image.sight import places, prompt_places

    model = pipe.vision_language_encoder.model
    config = model.config
    start, end, code = config.image_start_token_id, config.image_end_token_id, config.image_token_id
    text = [5, 6, 7, start]
    grids = torch.tensor([[1, 2, 5], [1, 3, 2]])  # the large picture's, then the small one's
    prompt, _ = model.get_rope_index(torch.tensor([text]), image_grid_thw=grids)
    ours, behind = prompt_places(text, code, [])
    assert prompt[:, 0].tolist() == ours.tolist()
    taught = model._cached_decode_position_ids[0]  # and one more, of the mark at the end
    assert places([(3, 2), (2, 5)], behind).tolist() == taught[:, :-1].tolist()

    edit = [5, start, *[code] * 6, end, start, *[code] * 2, end, 6, start]
    grids = torch.tensor([[1, 2, 3], [1, 2, 1], [1, 2, 2]])  # of those given, and the one to write
    prompt, _ = model.get_rope_index(torch.tensor([edit]), image_grid_thw=grids)
    ours, behind = prompt_places(edit, code, [(2, 3), (2, 1)])
    assert prompt[:, 0].tolist() == ours.tolist()
    taught = model._cached_decode_position_ids[0]
    assert places([(2, 2)], behind).tolist() == taught[:, :-1].tolist()


async def test_many_short_words_beside_a_long_one_take_no_memory_for_filling(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.families.glm_image import text

    words = ["", "no", "a" * 40, "", *["b"] * 30, "way"]
    prompt = " ".join(f"'{word}'" for word in words)
    async with running("glm_image", checkpoint, stages=["text"]) as rig:
        encoder = rig.engines["text"]._encoder  # type: ignore[attr-defined]
        (whole,) = await rig.stage("text", {"request": [{"prompt": prompt}]}, 1, {"guidance_scale": 1.0})
        monkeypatch.setattr(text, "_AT_ONCE", 100)
        passes: list[int] = []
        encoder._encoder.register_forward_pre_hook(lambda module, given: passes.append(given[0].numel()))
        (parts,) = await rig.stage("text", {"request": [{"prompt": prompt}]}, 1, {"guidance_scale": 1.0})
    assert len(passes) > 2
    assert max(passes) <= 100, "words were filled up to the longest"
    np.testing.assert_allclose(parts["words"], whole["words"], rtol=0, atol=1e-5)


def test_an_edit_without_a_size_is_no_larger_than_one_that_could_be_asked_for() -> None:
    from workers.engines.diffusion.family import Request, Wishes
    from workers.families.glm_image.wishes import picture_size

    def size(height: int, width: int) -> tuple[int, int]:
        return picture_size(Request({"images": [np.empty((height, width, 3), np.uint8)]}, Wishes(), 1))

    assert size(70, 100) == (64, 96)
    assert size(2048, 2048) == (2048, 2048)
    assert size(5600, 5600) == (2048, 2048)  # 30 625 codes otherwise
    assert size(3000, 4000) == (1536, 2048)
    assert size(3001, 3001) == (2048, 2048)
    assert size(4000, 10) == (2048, 32)


async def test_what_it_can_not_draw_is_named(checkpoint: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"prompt": "a dog", "negative_prompt": "cats"}, {}, "negative_prompt"),
        ({"prompt": "a dog"}, {"width": 48}, "size"),
        ({"prompt": "a dog"}, {"num_inference_steps": 0}, "num_inference_steps"),
        ({"prompt": "a <|image|> of a dog"}, {}, "prompt"),
        ({"prompt": "a dog"}, {"width": 2048, "height": 2048}, "size"),  # more than this model's positions
        ({"prompt": "a dog", "images": [PICTURES[0][:8]]}, {}, "image"),  # too narrow
        ({"prompt": "a dog", "images": PICTURES[:1]}, {"strength": 0.5}, "strength"),
        ({"prompt": "a dog", "images": PICTURES[:1], "mask": PICTURES[0][..., 0]}, {}, "mask"),
    ]
    async with running("glm_image", checkpoint, *SMALL) as rig:
        for request, params, field in cases:
            with pytest.raises(ItemError) as caught:
                await rig.paint(request, seed=1, **{**SQUARE, "num_inference_steps": 1, **params})
            assert (caught.value.status, caught.value.param) == (400, field)
