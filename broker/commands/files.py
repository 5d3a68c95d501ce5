"""Files named on the command line: read as the gateway reads uploads, within its usual bounds, or written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from broker.commands.common import FAILED, USAGE, say

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
            await pictures.decode(_bytes("--image", file), f"--image {file}", max_mp=bounds.max_image_mp)
            for file in images
        ]
        shown = [
            await films.decode(
                _bytes("--video", file),
                f"--video {file}",
                films.bounds(bounds),
                pixels=pixels,
                sound_s=sound_s,
            )
            for file in videos
        ]
        heard = [
            await media.decode(_bytes("--clip", file), f"--clip {file}", max_s=bounds.max_audio_s)
            for file in clips
        ]
    except ApiError as error:
        say(error.message)
        raise typer.Exit(USAGE) from None
    return Attached(heard, seen, [Video(film.frames, film.fps, film.sound) for film in shown])


class Draft:
    """A file that is written beside the one that is wanted, and takes its place when it is kept.

    Until then, and where nothing comes of it, whatever was there stays. It is made at once, so that a file
    that can't be written is known before anything is computed; that ends the command with a line. What is no
    plain file (/dev/null, a pipe) is written as it is.

    Attributes:
        file: To be written.
    """

    def __init__(self, path: Path) -> None:
        self._wanted = path.resolve()  # a link stays one
        self._draft = self._wanted
        if not path.exists() or path.is_file():
            self._draft = self._wanted.with_name(f".{self._wanted.name}.{os.getpid()}")
        self._path = path
        with self.writing():
            self.file: BinaryIO = self._draft.open("wb")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes: an error ends the command with a line."""
        try:
            yield
        except OSError as error:
            say(f"can't write {self._path}: {error.strerror or error}")
            raise typer.Exit(FAILED) from None

    def keep(self) -> None:
        """It is complete, or as much of it as there will be."""
        with self.writing():
            self.file.close()
            if self._draft != self._wanted:
                self._draft.replace(self._wanted)

    def drop(self) -> None:
        """Nothing came of it, unless it is kept already."""
        with suppress(OSError):
            self.file.close()
        if self._draft != self._wanted:
            self._draft.unlink(missing_ok=True)


def _bytes(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        say(f"{option} {path}: can't be read: {error.strerror}")
        raise typer.Exit(USAGE) from None
