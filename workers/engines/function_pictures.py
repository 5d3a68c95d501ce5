"""What the engine ``function`` draws: a picture of one colour, a given picture tinted, a film of such.

The colour is drawn from all that is asked (the words, the seed, steps, guidance), so each of them can be seen
to have arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from adapters.chunk import Payload
from workers.engine import ItemError

Edge = Annotated[int, Meta(ge=1, le=8192)]
Rgb = npt.NDArray[np.uint8]


class PictureParams(msgspec.Struct, frozen=True):
    """Parameters of ``picture`` and ``film``. None: as the stage says, or as the given picture is."""

    width: Edge | None = None
    height: Edge | None = None
    num_inference_steps: Annotated[int, Meta(ge=1)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0)] | None = None
    strength: Annotated[float, Meta(ge=0, le=1)] = 0.5  #: share of the colour in a given picture
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0
    num_frames: Annotated[int, Meta(ge=1, le=10_000)] = 8
    fps: Annotated[float, Meta(gt=0)] = 8.0


def pictures(
    asked: Sequence[Payload], text: str, params: PictureParams, seed: int, size: int
) -> Iterator[Payload]:
    """{"image": uint8 [height, width, 3]}, after as many darker ones, with ``partial``, as are wanted."""
    image = _picture(asked, text, params, seed, size)
    for number in range(params.partial_images):
        yield {"image": image // (params.partial_images - number + 1), "partial": number}
    yield {"image": image}


def film(asked: Sequence[Payload], text: str, params: PictureParams, seed: int, size: int) -> list[Payload]:
    """The halves of a film that grows lighter: {"frames": uint8 [frames, height, width, 3], "fps"} each."""
    image = _picture(asked, text, params, seed, size).astype(np.uint32)
    count = params.num_frames
    frames = np.stack([image * (number + 1) // count for number in range(count)]).astype(np.uint8)
    halves = [frames[: count // 2], frames[count // 2 :]]
    return [{"frames": half, "fps": params.fps} for half in halves if len(half)]


def _picture(asked: Sequence[Payload], text: str, params: PictureParams, seed: int, size: int) -> Rgb:
    words = text or "".join(str(payload.get("prompt", "")) for payload in asked)
    unwanted = [payload.get("negative_prompt") for payload in asked]
    said = f"{words}|{unwanted}|{seed}|{params.num_inference_steps}|{params.guidance_scale}"
    colour = np.frombuffer(hashlib.sha256(said.encode()).digest()[:3], np.uint8)
    given = next((payload["images"][0] for payload in asked if payload.get("images")), None)
    mask = next((payload["mask"] for payload in asked if payload.get("mask") is not None), None)
    if given is None:
        return np.tile(colour, (params.height or size, params.width or size, 1))
    height, width = params.height or given.shape[0], params.width or given.shape[1]
    share = np.full((*given.shape[:2], 1), params.strength)
    if mask is not None:
        if mask.shape != given.shape[:2]:
            raise ItemError(
                f"mask: {mask.shape}, and the picture {given.shape[:2]}", status=400, param="mask"
            )
        share = share * (mask[..., None] / 255)
    tinted = np.rint(given * (1 - share) + colour * share).astype(np.uint8)
    return _scaled(tinted, height, width)


def _scaled(image: Any, height: int, width: int) -> Rgb:
    """The nearest pixels."""
    rows = np.arange(height) * image.shape[0] // height
    columns = np.arange(width) * image.shape[1] // width
    scaled: Rgb = np.ascontiguousarray(image[rows][:, columns])
    return scaled
