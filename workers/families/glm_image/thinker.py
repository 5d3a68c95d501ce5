"""GLM-Image's language model for the engine ``ar``: a prompt to the codes of a picture.

An answer's length is known: the codes of a small picture, row by row, and then those of the large one, one
for 32 x 32 pixels; for an edit those of the large one alone. Each stands at its row and column. Where
diffusers would take a mark for a code, and fail, none can be drawn here: only codes are.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adapters.chunk import Payload
from pipelines.options import ArOptions
from workers.engine import ItemError, Job
from workers.engines.ar.attention import use_pages
from workers.engines.ar.family import Layout, Model, Prompt, Step, Work
from workers.engines.diffusion.family import Request, Wishes
from workers.engines.diffusion.requests import request_of
from workers.families.find import refuse
from workers.families.glm_image.sight import Given, Grid, Sight, places, prompt_places
from workers.families.glm_image.wishes import picture_size
from workers.families.parts import Parts
from workers.families.sampling import sampling_defaults
from workers.families.weights import Checkpoint

_CODES = 64  #: of one payload; a new attempt goes on behind the last whole one
_SAMPLING = {"do_sample": True}  #: as diffusers does, whatever the checkpoint says


class Reading(NamedTuple):
    """A request, read."""

    ids: list[int]  #: with a placeholder for each code of the given pictures
    grids: list[Grid]  #: of what is to be written
    given: Given | None


class Thinker(Model):
    """Its payloads are {"codes": [code, ...]}; together the small picture's and the large one's.

    The first one has beside that "grid": [rows, columns] of the large picture; and for an edit "given": int32
    [codes], those of the given pictures, and "given_grids": [[rows, columns], ...].
    """

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
        self._sight = Sight(checkpoint, **place)
        self._placeholder = config.image_token_id
        self._processor = parts.plain("processor", GlmImageProcessor)
        marks = [config.image_token_id, config.image_start_token_id, config.image_end_token_id]
        self._marks = self._processor.tokenizer.convert_ids_to_tokens(marks)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def begin(self, job: Job) -> Work | None:
        """The prompt, and where the codes stand."""
        request = await request_of(job, Wishes)
        loop = asyncio.get_running_loop()
        reading = await loop.run_in_executor(self._tokenizing, self._read, request)
        ids, grids, given = reading
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
        first: Payload = {"grid": list(grids[-1])}
        positions, end = prompt_places(ids, self._placeholder, given.grids if given else ())
        if given is not None:
            seen = await self.call(self._sight.codes, given)
            left = iter(seen)
            ids = [next(left) if token == self._placeholder else token for token in ids]
            first["given"] = torch.tensor(seen, dtype=torch.int32)
            first["given_grids"] = [list(grid) for grid in given.grids]
        prompt = Prompt(ids, positions=positions, answer_positions=places(grids, end))
        params = job.params | {"max_tokens": count, "min_tokens": 0}
        return Work(prompt, CodesOutput({} if job.resumed else first), params, written=written)

    def _read(self, request: Request) -> Reading:
        """Raises ItemError (400) for a prompt with tokens that stand for pictures, and for odd pictures."""
        from PIL import Image

        text, images = request.payload["prompt"], request.payload.get("images", [])
        if any(mark in text for mark in self._marks):
            raise ItemError("prompt: holds a token that stands for pictures", status=400, param="prompt")
        for name, value in (("mask", request.payload.get("mask")), ("strength", request.wishes.strength)):
            if value is not None:
                raise ItemError(f"{name}: this model takes none", status=400, param=name)
        height, width = picture_size(request)
        pictures = [Image.fromarray(np.asarray(image)) for image in images]
        content = [{"type": "image", "image": picture} for picture in pictures]
        try:
            read = self._processor.apply_chat_template(
                [[{"role": "user", "content": [*content, {"type": "text", "text": text}]}]],
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"target_h": height, "target_w": width},
            )
        except ValueError as error:  # a picture that is too narrow, say
            if not images:
                raise
            raise ItemError(f"image: {error}", status=400, param="image") from None
        grids = [(rows, columns) for _, rows, columns in read["image_grid_thw"].tolist()]
        ids: list[int] = read["input_ids"][0].tolist()
        if not images:
            large, small = grids
            return Reading(ids, [small, large], None)
        return Reading(ids, grids[-1:], Given(read["pixel_values"], grids[:-1]))

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

    def __init__(self, first: Payload) -> None:
        self._first = first
        self._codes: list[int] = []

    def push(self, step: Step) -> Payload | None:
        """One code."""
        self._codes.append(step.token)
        if step.finish is None and len(self._codes) < _CODES:
            return None
        payload: dict[str, Any] = {"codes": self._codes, **self._first}
        self._codes, self._first = [], {}
        return payload if step.finish is None else payload | {"finish_reason": step.finish}
