"""The painter's training: seeded, and after an interruption it goes on as if there had been none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch

from scripts.painter import autoencoder, denoiser, export
from scripts.painter.pictures import as_numbers
from scripts.painter.prompts import training
from scripts.painter.settings import Settings
from scripts.painter.states import Told

SMALL = Settings(
    bfloat16=False,
    save_s=0,
    max_tokens=4,
    autoencoder_steps=4,
    autoencoder_batch=2,
    widths=(8, 8, 8),
    denoiser_steps=4,
    denoiser_batch=4,
    heads=1,
    head_width=32,
    blocks=2,
    warm_up=2,
    down=0.01,
    shapes_from=2,
)


def told() -> Told:
    """Prompts whose states are noise with a large mean, as some entries of real ones have it."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(8, SMALL.max_tokens, 24, generator=random) * 9 + 30
    prompts = training(__import__("random").Random(1))
    return Told(
        rows.half(),
        rows.mean(1),
        torch.tensor([as_numbers(next(prompts).asked) for _ in range(8)]),
        rows.flatten(0, 1).mean(0),
        rows.flatten(0, 1).std(0),
    )


def test_an_interrupted_training_gives_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    ways: dict[str, dict[str, torch.Tensor]] = {}
    for way, ends in (("whole", [4]), ("interrupted", [2, 4])):
        folder = tmp_path / way
        folder.mkdir()
        for end in ends:
            vae = autoencoder.train(msgspec.structs.replace(SMALL, autoencoder_steps=end), folder)
        for end in ends:
            settings = msgspec.structs.replace(SMALL, denoiser_steps=end)
            transformer = denoiser.train(settings, folder, told(), vae)
        ways[way] = {**vae.state_dict(), **transformer.state_dict()}
    assert all(torch.equal(value, ways["interrupted"][name]) for name, value in ways["whole"].items())
    with pytest.raises(SystemExit, match="other settings"):
        autoencoder.train(msgspec.structs.replace(SMALL, seed=2), tmp_path / "whole")


def test_the_weights_that_are_kept_take_the_language_models_states_as_they_are(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    torch.set_num_threads(1)
    settings, states = SMALL, told()
    torch.manual_seed(1)
    trained = SD3Transformer2DModel(**settings.transformer(24)).eval()
    rows, pooled = states.rows.float(), states.pooled
    scale = denoiser.Scale.of(states)
    call = {
        "hidden_states": torch.randn(8, SMALL.latent_channels, 16, 16),
        "timestep": torch.full((8,), 500.0),
        "return_dict": False,
    }
    with torch.inference_mode():
        scaled_rows, scaled_pooled = scale(rows, pooled)
        wanted = trained(encoder_hidden_states=scaled_rows, pooled_projections=scaled_pooled, **call)[0]
        export.export(
            tmp_path,
            settings,
            denoiser.finished(settings, states, trained.state_dict()),
            AutoencoderKL(**settings.vae),
        )
        kept = SD3Transformer2DModel.from_pretrained(
            tmp_path, subfolder="transformer", torch_dtype=torch.float32
        )
        given = kept(encoder_hidden_states=rows, pooled_projections=pooled, **call)[0]
    torch.testing.assert_close(given, wanted, rtol=0, atol=0.02)
