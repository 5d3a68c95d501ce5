"""GLM-Image's language model for the engine ``ar``: a prompt to the codes of a picture.

An answer's length is known: the codes of a small picture, row by row, and then those of the large one, one
for 32 x 32 pixels. Each stands at its row and column. Where diffusers would take a mark for a code, and fail,
none can be drawn here: only codes are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import ItemError, Job
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.engines.diffusion.family import Wishes
from workers.engines.diffusion.requests import request_of
from workers.families.find import refuse
from workers.families.glm_image.wishes import picture_size
from workers.families.parts import Parts
from workers.families.sampling import sampling_defaults
from workers.families.weights import Checkpoint

_CODES = 64  #: of one payload; a new attempt goes on behind the last whole one
_SAMPLING = {"do_sample": True}  #: as diffusers does, whatever the checkpoint says

Grid = tuple[int, int]  #: rows and columns


class Thinker(Model):
    """Its payloads are {"codes": [code, ...]}; together the small picture's and the large one's."""

    axes = 3

    def __init__(self, folder: Path, options: ArOptions, device: torch.device) -> None:
        super().__init__(folder, options, device)
        refuse(options, "family_options", "hidden_layers", "system_prompt", "max_tokens")
        from transformers import GlmImageProcessor
        from transformers.models.glm_image.modeling_glm_image import GlmImageTextModel

        parts = Parts(str(folder), device=str(device))
        checkpoint = Checkpoint(str(parts.folder("vision_language_encoder")))
        config = checkpoint.config
        text = config.text_config
        place = {"device": str(device), "dtype": checkpoint.dtype(options.dtype, device.type)}
        self.decoder = use_pages(
            checkpoint.part(lambda: GlmImageTextModel._from_config(text), "model.language_model.", **place)
        )
        self._head = checkpoint.part(
            lambda: torch.nn.Linear(text.hidden_size, text.vision_vocab_size, bias=False),
            "lm_head.",
            **place,
        )
        self.layout = Layout.of(text, place["dtype"])
        self.max_positions = text.max_position_embeddings
        self.suppressed_ids = range(config.vq_config.num_embeddings, text.vision_vocab_size)
        generation = {f"thinker_{name}": value for name, value in checkpoint.generation.items()}
        self.defaults = sampling_defaults(generation, "thinker", _SAMPLING)
        self._marks = {config.image_token_id, config.image_start_token_id, config.image_end_token_id}
        self._processor = parts.plain("processor", GlmImageProcessor)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def begin(self, job: Job) -> Work | None:
        """The prompt, and where the codes stand."""
        request = await request_of(job, Wishes)
        height, width = picture_size(request.wishes)
        loop = asyncio.get_running_loop()
        ids, grids = await loop.run_in_executor(
            self._tokenizing, self._read, request.payload["prompt"], height, width
        )
        written = [[code] for payload in job.resumed for code in payload["codes"]]
        count = sum(rows * columns for rows, columns in grids)
        if len(written) >= count:
            return None
        if len(ids) + count > self.max_positions:
            raise ItemError(
                f"size: {count} codes and a prompt of {len(ids)} tokens are more than {self.max_positions}",
                status=400,
                param="size",
            )
        prompt = Prompt(ids, answer_positions=places(grids, len(ids)))
        params = job.params | {"max_tokens": count, "min_tokens": 0}
        return Work(prompt, CodesOutput(), params, written=written)

    def _read(self, text: str, height: int, width: int) -> tuple[list[int], list[Grid]]:
        """The prompt's tokens, and the grids of the small picture and of the large one.

        Raises ItemError (400) for a prompt with tokens that stand for pictures.
        """
        read = self._processor.apply_chat_template(
            [[{"role": "user", "content": [{"type": "text", "text": text}]}]],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"target_h": height, "target_w": width},
        )
        ids: list[int] = read["input_ids"][0].tolist()
        if self._marks.intersection(ids[:-1]):  # the last one begins the picture
            raise ItemError("prompt: holds a token that stands for pictures", status=400, param="prompt")
        large, small = ((rows, columns) for _, rows, columns in read["image_grid_thw"].tolist())
        return ids, [small, large]

    def embed(self, codes: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[B, 1] -> [B, hidden]"""
        embedded: torch.Tensor = self.decoder.embed_tokens(codes[:, 0])
        return embedded

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[B, hidden] -> [B, codes and marks]"""
        scores: torch.Tensor = self._head(last)
        return scores


class CodesOutput:
    """Codes, some at a time."""

    stopped = False

    def __init__(self) -> None:
        self._codes: list[int] = []

    def push(self, step: Step) -> Payload | None:
        """One code."""
        self._codes.append(step.token)
        if step.finish is None and len(self._codes) < _CODES:
            return None
        payload: dict[str, Any] = {"codes": self._codes}
        self._codes = []
        return payload if step.finish is None else payload | {"finish_reason": step.finish}


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
