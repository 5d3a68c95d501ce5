"""What GLM-Image's language model sees of a picture: codes, like those that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workers.families.weights import Checkpoint

Grid = tuple[int, int]  #: rows and columns


class Given(NamedTuple):
    """Pictures, prepared."""

    pixels: torch.Tensor  #: float32 [patches of all, 3 x 16 x 16]
    grids: list[Grid]  #: a patch for each code


class Sight:
    """The tower, and the codebook that its rows are looked up in."""

    def __init__(self, checkpoint: Checkpoint, **place: Any) -> None:
        from transformers.models.glm_image import modeling_glm_image as modeling

        config = checkpoint.config
        self._tower = checkpoint.part(
            lambda: modeling.GlmImageVisionModel._from_config(config.vision_config), "model.visual.", **place
        )
        self._book = checkpoint.part(
            lambda: modeling.GlmImageVQVAE._from_config(config.vq_config), "model.vqmodel.", **place
        )

    def codes(self, given: Given) -> list[int]:
        """Of all pictures, one after the other, row by row."""
        grids = torch.tensor([[1, *grid] for grid in given.grids], device=self._tower.device)
        pixels = given.pixels.to(self._tower.device, self._tower.dtype)
        rows = self._tower(pixels, grid_thw=grids, return_dict=True).pooler_output
        codes: list[int] = []
        for picture, (height, width) in zip(
            rows.split([height * width for height, width in given.grids]), given.grids, strict=True
        ):
            features = picture.view(1, height, width, -1).permute(0, 3, 1, 2).contiguous()
            codes += self._book.encode(features).image_tokens.tolist()
        return codes


def places(grids: Sequence[Grid], first: int) -> torch.Tensor:
    """Where the codes of pictures stand that follow each other from position ``first`` on, int [3, codes].

    On the first axis a picture has one position, on the others its rows and columns are counted from there.
    The next picture begins behind the longer of its edges (transformers: GlmImageModel.get_rope_index).
    """
    positions = []
    for rows, columns in grids:
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions.append(torch.stack([torch.zeros_like(row), row, column]).flatten(1) + first)
        first += max(rows, columns)
    return torch.cat(positions, 1)


def prompt_places(ids: Sequence[int], placeholder: int, grids: Sequence[Grid]) -> tuple[torch.Tensor, int]:
    """Where a prompt's tokens stand, int [3, tokens], and the position behind them.

    Args:
        ids: With a placeholder for each code of the given pictures.
        placeholder: Its id.
        grids: The given pictures'.
    """
    positions, first, at = [], 0, 0
    for rows, columns in grids:
        start = list(ids).index(placeholder, at)
        positions.append(torch.arange(first, first + start - at).expand(3, -1))
        first += start - at
        positions.append(places([(rows, columns)], first))
        first += max(rows, columns)
        at = start + rows * columns
    end = first + len(ids) - at
    positions.append(torch.arange(first, end).expand(3, -1))
    return torch.cat(positions, 1), end


def doubled(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A picture's codes, each for 2 x 2 patches of the diffusion transformer: int [1, 4 x codes]."""
    return codes.view(grid).repeat_interleave(2, 0).repeat_interleave(2, 1).view(1, -1)
