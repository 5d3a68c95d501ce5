"""The gateway's bounds, each of them a command line option (see ``__main__``)."""

from __future__ import annotations

import argparse
from typing import Any, get_origin

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What callers may ask of the gateway."""

    max_body_mb: float = 48.0  #: MiB of a request's body; more is refused with 413
    max_audio_mb: float = 25.0  #: MiB of one uploaded audio file, as uploaded
    max_audio_s: float = 1800.0  #: seconds of audio in one request, decoded
    max_clips: int = 16  #: clips in one request
    max_image_mb: float = 20.0  #: MiB of one uploaded picture, as uploaded
    max_image_mp: float = 32.0  #: megapixels of one picture, at most 178
    max_images: int = 16  #: pictures in one request
    max_video_mb: float = 32.0  #: MiB of one uploaded video, as uploaded
    max_video_mp: float = 9.0  #: megapixels of a video's frame, as uploaded
    max_video_s: float = 120.0  #: seconds of one video
    max_videos: int = 4  #: videos in one request
    video_fps: float = 2.0  #: frames a second that are kept of a video
    max_frames: int = 64  #: frames that are kept of one video at most, spread over all of it
    max_frame_mp: float = 1.0  #: megapixels that kept frames are shrunk to if they have more
    max_pixels_mp: float = 192.0  #: megapixels of all pictures and kept frames of one request
    max_choices: int = 16  #: the largest `n`
    max_open: int = 2048  #: requests that are handled at once; more are refused with 503
    stall_s: float = 30.0  #: a client that takes nothing for so long loses its request
    probe_s: float = 2.0  #: how long /ready and /metrics wait for the broker
    api_keys: str = ""  #: a file of API keys, see :mod:`broker.gateway.keys`; "": everybody may ask
    allow_media_host: list[str] = []  #: hosts that media may be fetched from, see `fetch.Fetcher`
    allow_media_private: bool = False  #: also where they lead to addresses that are not public

    def __post_init__(self) -> None:
        """Raises ValueError for a bound that lets nothing through."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be above 0")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting."""
    for field in msgspec.structs.fields(Settings):
        kind: dict[str, Any] = {"type": field.type}
        if field.type is bool:
            kind = {"action": "store_true"}
        elif get_origin(field.type) is list:
            kind = {"action": "append"}
        default = [] if field.default is msgspec.NODEFAULT else field.default
        parser.add_argument("--" + field.name.replace("_", "-"), default=default, **kind)
