"""Random draws of vLLM that depend on a request's seed and on the token's place, and on nothing else.

vLLM's first model runner (the one that CPUs get) gives each request a generator that goes on from token to
token, so a process that takes over in the middle of an answer draws other numbers. Its second one draws by
seed and place. This brings the first one to do as the second does: before each token, the generators of all
requests are seeded anew.

There is a second reason on CPUs. A prompt that is read in several steps makes the first runner rewind the
request's generator, which a CPU generator refuses; vLLM 0.32 dies of it, and all its requests with it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class PlacedGenerator(torch.Generator):  # type: ignore[misc]  # torch counts as untyped
    """A generator that is seeded before each use, so there is nothing to rewind."""

    def get_offset(self) -> int:
        """Any place is as good as another."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Ignored: the next use begins with a seed."""


def draw_by_place(worker: Any) -> None:
    """Prepares a vLLM worker; to be sent through ``collective_rpc``."""
    runner = worker.model_runner
    if not isinstance(runner, GPUModelRunner):
        return  # the second runner, which needs nothing

    def seed_all(*_: object) -> None:
        batch = runner.input_batch
        for row in list(batch.generators):
            request = runner.requests[batch.req_ids[row]]
            if not isinstance(request.generator, PlacedGenerator):
                request.generator = PlacedGenerator(device=request.generator.device)
            # In both places, since a request that vLLM puts aside for a while loses its row.
            batch.generators[row] = request.generator
            request.generator.manual_seed(place_seed(request.sampling_params.seed, request.num_tokens))

    runner.sampler.register_forward_pre_hook(seed_all)


def place_seed(seed: int, place: int) -> int:
    """32 bits, all that a CPU generator looks at, for the token that has ``place`` others before it."""
    text = f"{seed} {place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
