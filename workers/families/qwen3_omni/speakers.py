"""Who can speak: the names that a Qwen3-Omni checkpoint has for its voices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.engine import ItemError


class Speakers:
    """Names of a checkpoint's speakers, whatever their case; the default is "Ethan", as with transformers.

    Raises ValueError for a checkpoint that can't speak, as Qwen3-Omni's Thinking and Captioner can't.
    """

    def __init__(self, config: Any, folder: Path) -> None:
        ids = config.talker_config.speaker_id if config.enable_audio_output else None
        if not ids:
            raise ValueError(
                f"{folder}: this checkpoint has no talker (enable_audio_output is "
                f"{config.enable_audio_output}), so it can't speak; take Qwen3-Omni Instruct"
            )
        self._ids: dict[str, int] = {name.lower(): number for name, number in ids.items()}

    def name(self, wish: str | None) -> str:
        """The speaker's name as the checkpoint has it. Raises ItemError (400) that lists the speakers."""
        if wish is None:
            return "ethan" if "ethan" in self._ids else next(iter(self._ids))
        if wish.lower() not in self._ids:
            raise ItemError(
                f"voice: no voice {wish!r}; there are {', '.join(self._ids)}", status=400, param="voice"
            )
        return wish.lower()

    def token(self, wish: str | None) -> int:
        """The speaker's token in the talker's vocabulary. Raises ItemError (400)."""
        return self._ids[self.name(wish)]
