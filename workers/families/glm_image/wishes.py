"""What a request may ask of GLM-Image, and what stages must agree about."""

from __future__ import annotations

from workers.engines.diffusion.family import Request, Wishes, size_of

#: What diffusers' pipeline takes where it is told nothing.
SIZE, STEPS, GUIDANCE = 1024, 50, 1.5
CODE = 32  #: pixels of a code's edge
EDGE = 2048  #: pixels: the pipeline's endpoints allow no longer one


def picture_size(request: Request) -> tuple[int, int]:
    """(height, width) in pixels; of an edit that names none those of its first picture, cut to a multiple.

    A larger picture counts as shrunk to the longest edge that callers may ask for.

    Raises ItemError (400).
    """
    wishes, images = request.wishes, request.payload.get("images", [])
    if images and wishes.width is None and wishes.height is None:
        edges = images[0].shape[:2]
        longest = max(EDGE, *edges)
        height, width = (max(pixels * EDGE // longest // CODE, 1) * CODE for pixels in edges)
        return height, width
    return size_of(wishes, default=SIZE, multiple=CODE)


def guided(wishes: Wishes) -> bool:
    """Whether there is a second branch."""
    return (GUIDANCE if wishes.guidance_scale is None else wishes.guidance_scale) > 1
