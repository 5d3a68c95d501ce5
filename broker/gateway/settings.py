"""The gateway's bounds, each of them an option of its command line and of `omni-broker start`."""

from __future__ import annotations

import argparse
import math
import re
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

_HOST = re.compile(r"\.?[^\s/*@,:.-][^\s/*@,]*")


class SettingsError(ValueError):
    """A setting that makes no sense; the message names its option."""


def says(text: str) -> Meta:
    """What a setting's option says about itself."""
    return Meta(description=text)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What callers may ask of the gateway. Raises SettingsError for a bound that lets nothing through."""

    max_body_mb: Annotated[float, says("MiB of a request's body; more is refused with 413.")] = 48.0
    max_audio_mb: Annotated[float, says("MiB of one uploaded audio file, as uploaded.")] = 25.0
    max_audio_s: Annotated[float, says("Seconds of audio in one request, decoded.")] = 1800.0
    max_clips: Annotated[int, says("Clips in one request.")] = 16
    max_image_mb: Annotated[float, says("MiB of one uploaded picture, as uploaded.")] = 20.0
    max_image_mp: Annotated[float, says("Megapixels of one picture, at most 178.")] = 32.0
    max_images: Annotated[int, says("Pictures in one request.")] = 16
    max_video_mb: Annotated[float, says("MiB of one uploaded video, as uploaded.")] = 32.0
    max_video_mp: Annotated[float, says("Megapixels of a video's frame, as uploaded.")] = 9.0
    max_video_s: Annotated[float, says("Seconds of one video.")] = 120.0
    max_videos: Annotated[int, says("Videos in one request.")] = 4
    video_fps: Annotated[float, says("Frames a second that are kept of a video.")] = 2.0
    max_frames: Annotated[int, says("Frames that are kept of one video at most, spread over all of it.")] = 64
    max_frame_mp: Annotated[float, says("Megapixels that kept frames are shrunk to if they have more.")] = 1.0
    max_video_decode_s: Annotated[float, says("Seconds that decoding one video may take.")] = 60.0
    max_pixels_mp: Annotated[float, says("Megapixels of all pictures and kept frames of one request.")] = (
        192.0
    )
    max_decoded_mb: Annotated[
        float, says("MiB of all requests' media that are held at once; more are refused with 503.")
    ] = 2048.0
    max_choices: Annotated[int, says("The largest `n`.")] = 16
    max_open: Annotated[int, says("Requests that are handled at once; more are refused with 503.")] = 2048
    stall_s: Annotated[
        float, says("A caller that takes, or sends, nothing for so many seconds loses its request.")
    ] = 30.0
    probe_s: Annotated[float, says("Seconds that /ready and /metrics wait for the broker.")] = 2.0
    api_keys: Annotated[str, says("A file of API keys; without one everybody may ask.")] = ""
    allow_media_host: Annotated[
        list[str],
        says(
            "A host that links in messages may lead to, or .example.org for all hosts below it. Repeat it "
            "for more. Default: links are refused."
        ),
    ] = []
    allow_media_private: Annotated[bool, says("Also where such a host is not on the internet.")] = False

    def __post_init__(self) -> None:
        for option in options():
            value = getattr(self, option.name)
            if option.kind in (int, float) and not 0 < value < math.inf:
                raise SettingsError(f"{option.flag} {value}: must be a number above 0")
        for host in self.allow_media_host:
            if not _HOST.fullmatch(host):
                text = "name a host, or all hosts below one with .example.org"
                raise SettingsError(f"--allow-media-host {host!r}: {text}")

    def command_line(self) -> tuple[str, ...]:
        """The options that make a gateway have these settings."""
        changed = [option for option in options() if getattr(self, option.name) != option.default]
        return tuple(word for option in changed for word in option.words(getattr(self, option.name)))


class Option(NamedTuple):
    """A setting, as command lines need it."""

    name: str
    flag: str
    kind: type  #: bool, int, float, str, or list (of str)
    default: Any
    help: str

    def words(self, value: Any) -> list[str]:
        """What sets it to this, on a command line."""
        if self.kind is bool:
            return [self.flag]
        return [f"{self.flag}={part}" for part in (value if self.kind is list else [value])]


def options() -> list[Option]:
    """All settings."""
    return [
        Option(
            field.name,
            "--" + field.name.replace("_", "-"),
            get_origin(kind) or kind,
            field.default_factory() if field.default is msgspec.NODEFAULT else field.default,
            meta.description,
        )
        for field in msgspec.structs.fields(Settings)
        for kind, meta in [get_args(field.type)]
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting."""
    for option in options():
        how: dict[str, Any] = {"type": option.kind}
        if option.kind is bool:
            how = {"action": "store_true"}
        elif option.kind is list:
            how = {"action": "append"}
        parser.add_argument(option.flag, default=option.default, help=option.help, **how)
