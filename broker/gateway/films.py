"""Uploaded videos to frames: RGB, upright, not too many, within bounds that hold while decoding.

Which frames are kept follows the tools that the makers of Qwen's models publish (qwen-vl-utils): so many a
second, at least four, at most as many as are allowed, an even number of them, spread evenly from the first
to the last. A file is read once without decoding, to count its frames, whatever its header claims.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from broker.gateway import media
from broker.gateway.errors import ApiError
from broker.gateway.media import Samples
from broker.gateway.pictures import Rgb
from broker.gateway.settings import Settings
from broker.gateway.uploads import Pixels, in_thread

MIN_FRAMES = 4  #: of a film that has so many
MAX_RATE = 240  #: frames a second in a file, on average

FORMATS = ("mp4", "mov", "webm", "mkv", "avi")
_DEMUXERS = ("mov", "matroska", "avi")


class Film(NamedTuple):
    """What there is to see, and to hear, in a video."""

    frames: Rgb  #: [frames, height, width, 3]
    fps: float  #: frames a second, of those that were kept
    sound: Samples | None  #: its sound track, where that is wanted: mono at 16 kHz


class Bounds(NamedTuple):
    """What a video may have.

    Attributes:
        seconds: Longer ones are refused.
        megapixels: Of one frame in the file; larger ones are refused.
        fps: Frames a second to keep.
        frames: Frames to keep at most.
        frame_mp: Megapixels that a kept frame is shrunk to if it has more.
        decode_s: Seconds that decoding may take.
    """

    seconds: float
    megapixels: float
    fps: float
    frames: int
    frame_mp: float
    decode_s: float


def bounds(settings: Settings) -> Bounds:
    """Those that the gateway's settings say."""
    return Bounds(
        settings.max_video_s,
        settings.max_video_mp,
        settings.video_fps,
        settings.max_frames,
        settings.max_frame_mp,
        settings.max_video_decode_s,
    )


async def decode(
    data: bytes, field: str, bounds: Bounds, *, pixels: Pixels, sound_s: float | None = None
) -> Film:
    """Decodes a file, in a thread.

    Args:
        data: The file.
        field: Its place in the request, for errors.
        bounds: What is allowed.
        pixels: The request's allowance, for the frames that are kept.
        sound_s: Decode the sound track too, of so many seconds at most.

    Raises:
        ApiError: 400 for what is no video, and for one without sound where that is wanted; 413 for one that
            is too long or too large.
    """
    demuxer = sniff(data)
    if demuxer is None:
        raise ApiError(
            f"{field}: not a video; accepted are {', '.join(FORMATS)}", field, code="invalid_video"
        )
    return await in_thread(partial(_Reader(data, demuxer, field, bounds).film, pixels, sound_s))


def sniff(data: bytes) -> str | None:
    """The demuxer for a video, from its first bytes; None for anything unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    demuxer = media.sniff(data)
    return demuxer if demuxer in _DEMUXERS else None


def chosen(total: int, seconds: float, fps: float, most: int) -> npt.NDArray[np.intp]:
    """The numbers of the frames to keep, of ``total`` in so many seconds."""
    wanted = min(max(seconds * fps, MIN_FRAMES), most, total)
    return np.linspace(0, total - 1, max(int(wanted) // 2 * 2, 1)).round().astype(np.intp)


class _Reader:
    """One file."""

    def __init__(self, data: bytes, demuxer: str, field: str, bounds: Bounds) -> None:
        self._data = data
        self._demuxer = demuxer
        self._field = field
        self._bounds = bounds
        self._began = 0.0

    def film(self, pixels: Pixels, sound_s: float | None, stop: Event) -> Film:
        self._began = time.monotonic()
        total, seconds = self._measure(stop)
        numbers = chosen(total, seconds, self._bounds.fps, self._bounds.frames)
        found, frames = self._read(numbers, pixels, stop)
        if 0 < found < total and len(frames) < len(numbers):  # packets that held no frame: now it is known
            numbers = chosen(found, seconds, self._bounds.fps, self._bounds.frames)
            _, frames = self._read(numbers, None, stop)
        if not len(frames):
            raise self._invalid("holds no frame that can be decoded")
        sound = None
        if sound_s is not None:
            sound = media.read(self._data, self._demuxer, self._field, sound_s, stop)
        return Film(frames, len(frames) / seconds, sound)

    def _measure(self, stop: Event) -> tuple[int, float]:
        """How many frames there are, and how many seconds they take. Decodes nothing."""
        count = first = last = 0
        with self._open() as (container, stream):
            self._check_size(stream.codec_context.width, stream.codec_context.height)
            for packet in container.demux(stream):
                when = packet.dts if packet.pts is None else packet.pts
                if not packet.size or packet.is_discard or when is None:
                    continue
                first, last = (min(first, when), max(last, when)) if count else (when, when)
                count += 1
                self._check_length(count, float((last - first) * stream.time_base))
                if stop.is_set():
                    break
            if not count:
                raise self._invalid("holds no frame")
            if last > first:  # the mean pause comes after the last frame too
                return count, float((last - first) * stream.time_base) * count / (count - 1)
            return count, count / float(stream.average_rate or 1)

    def _check_length(self, count: int, seconds: float) -> None:
        most = self._bounds.seconds
        if seconds > most or count > most * MAX_RATE:
            raise ApiError(
                f"{self._field}: longer than the {most:g} s that are allowed",
                self._field,
                status=413,
                code="video_too_long",
            )

    def _check_time(self) -> None:
        if time.monotonic() - self._began > self._bounds.decode_s:
            raise ApiError(
                f"{self._field}: can't be decoded in {self._bounds.decode_s:g} s; send it shorter or smaller",
                self._field,
                status=413,
                code="video_too_large",
            )

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._bounds.megapixels * 1e6:
            raise ApiError(
                f"{self._field}: {width} x {height} pixels; at most {self._bounds.megapixels:g} megapixels "
                "are allowed",
                self._field,
                status=413,
                code="video_too_large",
            )

    def _read(self, numbers: npt.NDArray[np.intp], pixels: Pixels | None, stop: Event) -> tuple[int, Rgb]:
        """Decodes as far as the last of these frames. Returns how many were there, and those kept."""
        frames: Rgb = np.empty((0, 0, 0, 3), np.uint8)
        found = kept = 0
        with self._open() as (container, stream):
            for frame in container.decode(stream):
                self._check_size(frame.width, frame.height)
                self._check_time()
                if found == numbers[kept]:
                    rgb = self._rgb(frame, frames.shape[1:3] if kept else None)
                    if not kept:
                        if pixels is not None:
                            pixels.take(rgb.shape[0] * rgb.shape[1] * len(numbers), self._field)
                        frames = np.empty((len(numbers), *rgb.shape), np.uint8)
                    frames[kept] = rgb
                    kept += 1
                found += 1
                if kept == len(numbers) or stop.is_set():
                    break
        return found, frames[:kept]

    def _rgb(self, frame: Any, shape: tuple[int, ...] | None) -> Rgb:
        """One frame's pixels, upright, of the height and width that the first one had."""
        turns = round(frame.rotation / 90) % 4  # counterclockwise, as rot90 has it
        if shape is not None:
            height, width = shape[::-1] if turns % 2 else shape
        else:
            shrink = min((self._bounds.frame_mp * 1e6 / (frame.width * frame.height)) ** 0.5, 1.0)
            height, width = max(int(frame.height * shrink), 1), max(int(frame.width * shrink), 1)
        how = "AREA" if (height, width) != (frame.height, frame.width) else "BICUBIC"
        upright = frame.reformat(width, height, "rgb24", interpolation=how).to_ndarray()
        return np.ascontiguousarray(np.rot90(upright, turns))

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        """The container and its first film stream. Whatever is wrong with the file becomes an ApiError."""
        import av
        from av.stream import Disposition

        options = {"protocol_whitelist": "none"}
        try:
            with av.open(io.BytesIO(self._data), format=self._demuxer, options=options) as container:
                streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
                if not streams:
                    raise self._invalid("holds no video")
                if streams[0].codec_context is None:
                    raise self._invalid("is of a codec that is not known here")
                # Sizes may change within a stream: the decoder itself refuses what is too large.
                streams[0].codec_context.options = {"max_pixels": str(int(self._bounds.megapixels * 1e6))}
                yield container, streams[0]
        except av.FFmpegError as error:
            raise self._invalid(f"can't be decoded: {error.strerror}") from None
        except (ValueError, MemoryError, OverflowError) as error:
            raise self._invalid(f"can't be decoded: {error}") from None

    def _invalid(self, why: str) -> ApiError:
        return ApiError(f"{self._field}: {why}", self._field, code="invalid_video")
