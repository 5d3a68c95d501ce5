"""Qwen2.5-Omni's code2wav: flow matching makes mel frames of codes, a BigVGAN makes sound of them.

The mel frames begin as noise and are carried to time 1 by an ordinary differential equation, whose velocity a
transformer gives. transformers' ``sample`` draws the noise of a whole answer at once; here it is a function
of the seed and the frame, so that a window's frames get the same in any window and in any attempt.

What does not change on the way is computed once: the speaker's embedding, the part of the transformer's input
that comes from the codes, and who attends to whom. transformers computes them anew at each of the 36
evaluations.

The transformer attends within blocks of 24 mel frames, in a few layers to the neighbouring block too. Windows
whose borders, context included, are borders of blocks (multiples of 12 codes) therefore see what the whole
answer would show them, but for what lies beyond the context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pipelines.options import OmniCode2WavOptions
from workers.families.qwen2_5_omni.speakers import Speakers
from workers.families.waves import Window
from workers.families.weights import Checkpoint

SAMPLE_RATE = 24_000
_NOISE_BLOCK = 64  #: mel frames whose noise is drawn together


class DecoderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the equation; the defaults are transformers'."""

    num_steps: Annotated[int, Meta(ge=2, le=1000)] = 10  #: points in time, the first and the last included
    guidance_scale: Annotated[float, Meta(ge=0)] = 0.5  #: how far from what no code at all would give
    sway_coefficient: float = -1.0  #: below 0: shorter steps at the beginning, where the noise is


class Decoder:
    """The decoder of one checkpoint."""

    codebooks = 1
    cpu_batch = 4  #: the transformer's operations are small; the vocoder's windows are computed one by one
    sample_rate = SAMPLE_RATE

    def __init__(self, model: str, options: OmniCode2WavOptions, device: str) -> None:
        import torch
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

        from workers.families.qwen2_5_omni.snake import without_detour

        checkpoint = Checkpoint(model)
        config = checkpoint.config.token2wav_config
        self.options = msgspec.convert(options.family_options, DecoderOptions)
        place = {"device": device, "dtype": checkpoint.dtype(options.dtype, device)}
        self._speakers = Speakers(checkpoint.folder)
        self._dit = checkpoint.part(
            lambda: modeling.Qwen2_5OmniToken2WavDiTModel(config.dit_config),
            "token2wav.code2wav_dit_model.",
            **place,
        )
        self._vocoder = checkpoint.part(
            lambda: modeling.Qwen2_5OmniToken2WavBigVGANModel(config.bigvgan_config),
            "token2wav.code2wav_bigvgan_model.",
            **place,
        )
        if place == {"device": "cpu", "dtype": torch.float32}:
            without_detour(self._vocoder)
        self._place = place
        self._mel_bins = config.dit_config.mel_dim
        self._repeats = config.dit_config.repeats
        self.codes = config.dit_config.num_embeds + 1
        self.hop = self._repeats * int(np.prod(config.bigvgan_config.upsample_rates))
        self._embeddings: dict[tuple[str, bool], Any] = {}

    def voice(self, name: str | None) -> str:
        """See :class:`workers.families.waves.Decoder`."""
        return self._speakers.name(name)

    def decode(self, windows: Sequence[Window]) -> list[NDArray[np.float32]]:
        """See :class:`workers.families.waves.Decoder`."""
        import torch

        with torch.inference_mode():
            mel = self._mel(windows)
            together = 1 if self._place["device"] == "cpu" else len(windows)
            # [batch, bins, frames]; a batch of one would come back without its first axis
            parts = [self._vocoder(part) for part in mel.transpose(1, 2).split(together)]
            waves = torch.cat([part.reshape(together, -1) for part in parts])
            return [np.ascontiguousarray(wave) for wave in waves.float().numpy()]

    def _mel(self, windows: Sequence[Window]) -> Any:
        """Mel frames [batch, frames, bins]."""
        import torch

        frames = windows[0].codes.shape[1] * self._repeats
        noise = [noise_of(w.seed, w.place * self._repeats, frames, self._mel_bins) for w in windows]
        start = torch.from_numpy(np.stack(noise)).to(**self._place)
        return integrate(self._velocity(windows), start, self._times())

    def _times(self) -> list[float]:
        """When the velocity is looked at anew. The formula is that of transformers' ``sample``."""
        even = np.linspace(0, 1, self.options.num_steps, dtype=np.float32)
        sway = np.float32(self.options.sway_coefficient)
        return [float(t) for t in even + sway * (np.cos(np.float32(np.pi / 2) * even) - 1 + even)]

    def _velocity(self, windows: Sequence[Window]) -> Callable[[float, Any], Any]:
        """(time, mel frames) -> their velocity, with guidance."""
        import torch

        scale, dit = self.options.guidance_scale, self._dit
        codes = torch.from_numpy(np.concatenate([w.codes for w in windows])).to(self._place["device"])
        guided = scale >= 1e-5  # below, the pass without codes would change nothing
        given = self._given([w.voice for w in windows], codes, guided=guided)
        rotary, masks = self._attention(codes.shape[1] * self._repeats)
        size = len(windows)
        from_noise = dit.input_embed.proj.weight[:, : self._mel_bins]

        def velocity(time: float, mel: Any) -> Any:
            hidden = given + torch.nn.functional.linear(torch.cat([mel, mel]) if guided else mel, from_noise)
            at = dit.time_embed(torch.full((1,), time, **self._place))
            for block, mask in zip(dit.transformer_blocks, masks, strict=True):
                normed, gate, shift, scaling, ff_gate = block.attn_norm(hidden, emb=at)
                seen = block.attn(normed, position_embeddings=rotary, attention_mask=mask)
                hidden = hidden + gate[:, None] * seen
                normed = block.ff_norm(hidden) * (1 + scaling[:, None]) + shift[:, None]
                hidden = hidden + ff_gate[:, None] * block.ff(normed)
            made = dit.proj_out(dit.norm_out(hidden, at))
            return made if not guided else made[:size] + (made[:size] - made[size:]) * scale

        return velocity

    def _given(self, voices: Sequence[str], codes: Any, *, guided: bool) -> Any:
        """The part of the transformer's input that is not the mel frames: [batch, frames, hidden].

        With guidance the batch is doubled: the second half knows neither codes nor speaker.
        """
        import torch

        dit = self._dit
        embedded = dit.text_embed(codes)
        timbre = torch.cat([self._embedding(name) for name in voices])
        speaker = torch.cat([self._speakers[name].cond for name in voices]).to(**self._place)
        if guided:
            embedded = torch.cat([embedded, dit.text_embed(codes, drop_code=True)])
            timbre = torch.cat([timbre, *[self._embedding(name, silent=True) for name in voices]])
            speaker = torch.cat([speaker, torch.zeros_like(speaker)])
        frames = embedded.shape[1]
        rest = [timbre[:, None].expand(-1, frames, -1), embedded, speaker[:, None].expand(-1, frames, -1)]
        proj = dit.input_embed.proj
        return torch.nn.functional.linear(torch.cat(rest, -1), proj.weight[:, self._mel_bins :], proj.bias)

    def _embedding(self, voice: str, *, silent: bool = False) -> Any:
        """A speaker's embedding [1, n] from the clip of the voice, or from as much silence."""
        if (voice, silent) not in self._embeddings:
            clip = self._speakers[voice].mel.to(**self._place)
            self._embeddings[voice, silent] = self._dit.input_embed.spk_encoder(clip * (not silent))
        return self._embeddings[voice, silent]

    def _attention(self, frames: int) -> tuple[Any, list[Any]]:
        """Rotary embeddings for the frames, and what each layer adds to its scores [1, 1, n, n]."""
        import torch

        dit = self._dit
        places = torch.arange(frames, device=self._place["device"])
        rotary = dit.rotary_embed(torch.empty(1, **self._place), places[None])
        blocks = places // dit.block_size
        apart = blocks[None, :] - blocks[:, None]
        masks = []
        for block in dit.transformer_blocks:
            seen = (apart >= -block.look_backward_block) & (apart <= block.look_ahead_block)
            mask = torch.zeros(frames, frames, **self._place).masked_fill_(~seen, -torch.inf)
            masks.append(mask[None, None])
        return rotary, masks


def integrate(velocity: Callable[[float, Any], Any], value: Any, times: Sequence[float]) -> Any:
    """Carries a value along its velocity, by the classical Runge-Kutta method's 3/8 rule (Kutta 1901)."""
    for time, end in itertools.pairwise(times):
        step = end - time
        k1 = velocity(time, value)
        k2 = velocity(time + step / 3, value + step * k1 / 3)
        k3 = velocity(time + step * 2 / 3, value + step * (k2 - k1 / 3))
        k4 = velocity(end, value + step * (k1 - k2 + k3))
        value = value + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return value


def noise_of(seed: int, first: int, count: int, bins: int) -> NDArray[np.float32]:
    """Normal noise [count, bins] of mel frames ``first``, ``first`` + 1, ...: always the same of a frame."""
    blocks = range(first // _NOISE_BLOCK, (first + count - 1) // _NOISE_BLOCK + 1)
    drawn = [
        np.random.default_rng((seed & (1 << 64) - 1, block)).standard_normal((_NOISE_BLOCK, bins), np.float32)
        for block in blocks
    ]
    skip = first - blocks.start * _NOISE_BLOCK
    return np.concatenate(drawn)[skip : skip + count]
