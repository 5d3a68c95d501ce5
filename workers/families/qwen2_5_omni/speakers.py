"""The voices of a Qwen2.5-Omni checkpoint: ``spk_dict.pt``, read as tensors and numbers, no other objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from workers.engine import ItemError

_USUAL = "Chelsie"  #: transformers' default


class Speaker(NamedTuple):
    """One voice."""

    bos_token: int  #: begins its text, in the thinker's vocabulary
    cond: Any  #: torch float32 [1, n], what the diffusion model knows it by
    mel: Any  #: torch float32 [1, frames, mel bins], a clip of it


class Speakers:
    """All voices of a checkpoint folder. Raises ValueError for a folder without any."""

    def __init__(self, folder: Path) -> None:
        import torch

        file = folder / "spk_dict.pt"
        if not file.is_file():
            raise ValueError(f"{folder} holds no voices: spk_dict.pt is missing")
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        self._speakers = {
            str(name): Speaker(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
            for name, entry in loaded.items()
        }
        self.default = _USUAL if _USUAL in self._speakers else next(iter(self._speakers))

    @property
    def names(self) -> list[str]:
        """The default first."""
        return [self.default, *(name for name in self._speakers if name != self.default)]

    def name(self, wanted: str | None) -> str:
        """The voice that a request means. Raises ItemError (400) that lists the voices."""
        if wanted is None:
            return self.default
        if wanted not in self._speakers:
            offered = ", ".join(self.names)
            raise ItemError(
                f"voice: no voice {wanted[:80]!r}; there are {offered}", status=400, param="voice"
            )
        return wanted

    def __getitem__(self, name: str) -> Speaker:
        return self._speakers[name]
