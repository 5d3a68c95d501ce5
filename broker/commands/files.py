"""Files named on the command line, decoded as the gateway decodes uploads and within its usual bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from broker.commands.common import USAGE, say

if TYPE_CHECKING:
    from broker.attached import Attached


async def read(
    images: Sequence[Path], videos: Sequence[Path], clips: Sequence[Path], *, sound_in_videos: bool
) -> Attached:
    """Decodes them all. Ends the command, with a line that names the file, for one that can't be."""
    from broker.attached import Attached
    from broker.gateway import films, media, pictures
    from broker.gateway.errors import ApiError
    from broker.gateway.settings import Settings
    from broker.gateway.uploads import Pixels
    from broker.pixels import Video

    bounds = Settings()
    pixels = Pixels(bounds.max_pixels_mp)
    sound_s = bounds.max_audio_s if sound_in_videos else None
    try:
        seen = [
            await pictures.decode(file.read_bytes(), f"--image {file}", max_mp=bounds.max_image_mp)
            for file in images
        ]
        shown = [
            await films.decode(
                file.read_bytes(), f"--video {file}", films.bounds(bounds), pixels=pixels, sound_s=sound_s
            )
            for file in videos
        ]
        heard = [
            await media.decode(file.read_bytes(), f"--clip {file}", max_s=bounds.max_audio_s)
            for file in clips
        ]
    except ApiError as error:
        say(error.message)
        raise typer.Exit(USAGE) from None
    return Attached(heard, seen, [Video(film.frames, film.fps, film.sound) for film in shown])
