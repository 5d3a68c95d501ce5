"""First training: an autoencoder that turns pictures into latents and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from scripts.painter.pictures import FIELDS, Pictures, completed
from scripts.painter.settings import Settings
from scripts.painter.state import Keeper, Progress, rate


def train(settings: Settings, folder: Path) -> Any:
    """Diffusers' AutoencoderKL, trained; goes on where it was interrupted."""
    from diffusers import AutoencoderKL

    torch.manual_seed(settings.seed)
    model = AutoencoderKL(**settings.vae)
    optimiser = torch.optim.AdamW(
        model.parameters(), settings.autoencoder_rate, (0.9, 0.99), weight_decay=1e-4
    )
    random = torch.Generator().manual_seed(settings.seed)
    keeper, done = Keeper(folder / "autoencoder.pt", "autoencoder", settings), 0
    if (kept := keeper.load()) is not None:
        model.load_state_dict(kept["model"])
        optimiser.load_state_dict(kept["optimiser"])
        random.set_state(kept["random"])
        done = kept["step"]
    pictures, progress = Pictures(), Progress("autoencoder", settings.autoencoder_steps)
    for step in range(done, settings.autoencoder_steps):
        for group in optimiser.param_groups:
            group["lr"] = settings.autoencoder_rate * rate(step, settings.autoencoder_steps, settings)
        batch = draw(pictures, settings.autoencoder_batch, random)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
            posterior = model.encode(batch).latent_dist
            back = model.decode(posterior.sample(random)).sample
        off = (back.float() - batch).abs()
        loss = ((off + off.square()) * weights(batch, settings.shape_weight)).mean()
        spread = posterior.kl().float().mean() / posterior.mean[0].numel()
        optimiser.zero_grad()
        (loss + settings.kl_weight * spread).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()
        progress.at(step + 1, loss=loss.item(), kl=spread.item())
        if keeper.due or step + 1 == settings.autoencoder_steps:
            keeper.save(
                {
                    "model": model.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "random": random.get_state(),
                    "step": step + 1,
                }
            )
    return _scaled(model.eval().requires_grad_(False), pictures, settings)


def weights(batch: torch.Tensor, shape: float) -> torch.Tensor:
    """Of each pixel, [n, 1, 64, 64], 1 on average: a shape is small, and yet what a picture is about."""
    corner = batch[:, :, :1, :1]  # no shape comes there
    ink = ((batch - corner).abs().amax(1, keepdim=True) > 0.05).float()
    heavy = 1 + (shape - 1) * functional.max_pool2d(ink, 5, 1, 2)
    return heavy / heavy.mean((1, 2, 3), keepdim=True)


def draw(pictures: Pictures, count: int, random: torch.Generator) -> torch.Tensor:
    """Pictures of any scenes, [count, 3, 64, 64]."""
    return pictures.draw(completed(torch.full((count, len(FIELDS)), -1), random), random)


def _scaled(model: Any, pictures: Pictures, settings: Settings) -> Any:
    """Notes how latents are to be shifted and scaled, so that they have mean 0 and deviation 1."""
    sample = draw(pictures, 512, torch.Generator().manual_seed(settings.seed))
    with torch.inference_mode():
        latents = model.encode(sample).latent_dist.mean
    model.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return model


def latents_of(model: Any, pixels: torch.Tensor, *, bfloat16: bool) -> torch.Tensor:
    """As the denoiser knows them."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        mean = model.encode(pixels).latent_dist.mean
    return (mean.float().clone() - model.config.shift_factor) * model.config.scaling_factor
