"""Second training: a transformer that makes latents out of noise, led by the language model's states.

Flow matching (Lipman et al. 2023; Esser et al. 2024): between a latent x and noise e lies (1 - t) x + t e,
and the transformer says e - x. t is drawn logit-normally. Now and then the prompt is the empty one, for
classifier-free guidance (Ho and Salimans 2022).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.painter.autoencoder import latents_of, weights
from scripts.painter.pictures import Pictures, completed
from scripts.painter.settings import Settings
from scripts.painter.state import Keeper, Progress, rate
from scripts.painter.states import Told

TIMESTEPS = 1000  #: the transformer's t, as diffusers' schedulers count it


class Scale(NamedTuple):
    """How states are shifted and scaled for the training; the weights that are kept do it themselves."""

    rows: tuple[torch.Tensor, torch.Tensor]  #: mean and deviation, [hidden] each
    pooled: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, told: Told) -> Scale:
        """That of the training's prompts."""
        return cls((told.mean, told.deviation), (told.pooled.mean(0), told.pooled.std(0)))

    def __call__(self, rows: torch.Tensor, pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, tokens, hidden], [n, hidden] -> the same with mean 0 and deviation 1."""
        (mean, deviation), (whole, spread) = self
        return (rows.float() - mean) / deviation, (pooled - whole) / spread


def train(settings: Settings, folder: Path, told: Told, vae: Any) -> Any:
    """Diffusers' SD3Transformer2DModel with the averaged weights; goes on where it was interrupted.

    It takes the language model's states as they are.
    """
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(settings.seed)
    model = SD3Transformer2DModel(**settings.transformer(told.rows.shape[-1]))
    _begin_small(model)
    optimiser = torch.optim.AdamW(model.parameters(), settings.denoiser_rate, (0.9, 0.99), weight_decay=1e-2)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.Generator().manual_seed(settings.seed)
    keeper, done = Keeper(folder / "denoiser.pt", "denoiser", settings), 0
    if (kept := keeper.load()) is not None:
        model.load_state_dict(kept["model"])
        optimiser.load_state_dict(kept["optimiser"])
        random.set_state(kept["random"])
        average, done = kept["average"], kept["step"]
    batches = _Batches(settings, told, vae, random)
    progress, smooth = Progress("denoiser", settings.denoiser_steps), 0.0
    for step in range(done, settings.denoiser_steps):
        for group in optimiser.param_groups:
            group["lr"] = settings.denoiser_rate * rate(step, settings.denoiser_steps, settings)
        loss = batches.loss(model, step)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()
        _follow(average, model, min(settings.average, (step + 1) / (step + 10)))
        smooth += (loss.item() - smooth) / min(step + 1, 50)
        progress.at(step + 1, loss=smooth)
        if keeper.due or step + 1 == settings.denoiser_steps:
            keeper.save(
                {
                    "model": model.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "average": average,
                    "random": random.get_state(),
                    "step": step + 1,
                }
            )
    return finished(settings, told, average)


def finished(settings: Settings, told: Told, weights: dict[str, torch.Tensor]) -> Any:
    """A transformer with these weights that takes the states as they are."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(**settings.transformer(told.rows.shape[-1])).eval().requires_grad_(False)
    model.load_state_dict(weights)
    scale = Scale.of(told)
    _absorb(model.context_embedder, *scale.rows)
    _absorb(model.time_text_embed.text_embedder.linear_1, *scale.pooled)
    return model


def _absorb(layer: Any, mean: torch.Tensor, deviation: torch.Tensor) -> None:
    """W (x - mean) / deviation + b is W' x + b'."""
    layer.weight.div_(deviation)
    layer.bias.sub_(layer.weight @ mean)


class _Batches:
    """What the denoiser learns from."""

    def __init__(self, settings: Settings, told: Told, vae: Any, random: torch.Generator) -> None:
        self._settings = settings
        self._told = told
        self._scale = Scale.of(told)
        self._vae = vae
        self._random = random
        self._pictures = Pictures()

    def loss(self, model: Any, step: int) -> torch.Tensor:
        """Of one batch."""
        settings, told, random = self._settings, self._told, self._random
        chosen = torch.randint(len(told.rows), (settings.denoiser_batch,), generator=random)
        pictures = self._pictures.draw(completed(told.asked[chosen], random), random)
        latents = latents_of(self._vae, pictures, bfloat16=settings.bfloat16)
        rows, pooled = told.rows[chosen].float(), told.pooled[chosen]
        empty = torch.rand(settings.denoiser_batch, generator=random) < settings.without_prompt
        rows[empty], pooled[empty] = 0.0, 0.0  # as the language model's stage has it
        noise = torch.randn(latents.shape, generator=random)
        t = (torch.randn(settings.denoiser_batch, generator=random) + settings.noisy).sigmoid()
        mixed = torch.lerp(latents, noise, t[:, None, None, None])
        rows, pooled = self._scale(rows, pooled)
        # The fused attention's way back is several times as slow with short rows in bfloat16.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
            said = model(
                hidden_states=mixed,
                timestep=t * TIMESTEPS,
                encoder_hidden_states=rows,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        off = (said.float() - (noise - latents)).square()
        if step >= settings.shapes_from:
            heavy = functional.max_pool2d(
                weights(pictures, settings.shapes_weight), 64 // settings.latent_edge
            )
            off = off * heavy / heavy.mean((1, 2, 3), keepdim=True)
        return off.mean()


def _begin_small(model: Any) -> None:
    """At the beginning no block changes anything, and the answer is 0: such transformers learn faster."""
    for block in model.transformer_blocks:
        for norm in (block.norm1, block.norm1_context):
            torch.nn.init.zeros_(norm.linear.weight)
            torch.nn.init.zeros_(norm.linear.bias)
    for layer in (model.norm_out.linear, model.proj_out):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)


def _follow(average: dict[str, torch.Tensor], model: Any, keep: float) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1 - keep)
