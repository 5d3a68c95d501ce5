"""Uploaded audio to samples, with bounds that hold while decoding.

Whatever a file's header claims, no more than the allowed seconds are ever decoded. The container is told
from the file's first bytes and only that demuxer is used: FFmpeg's own probing knows formats (playlists)
that make it open other files and addresses.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.gateway.errors import ApiError
from broker.gateway.uploads import in_thread

Samples = npt.NDArray[np.float32]

SAMPLE_RATE = 16_000  #: Hz of what the pipelines get
MIN_S = 0.1  #: shorter clips are refused, as OpenAI does
RATES = (8_000, 192_000)  #: Hz, lowest and highest
MAX_CHANNELS = 8

#: Names of formats as callers write them -> FFmpeg's demuxer.
FORMATS = {
    "wav": "wav",
    "mp3": "mp3",
    "mpeg": "mp3",
    "mpga": "mp3",
    "flac": "flac",
    "ogg": "ogg",
    "oga": "ogg",
    "opus": "ogg",
    "m4a": "mov",
    "mp4": "mov",
    "aac": "aac",
    "webm": "matroska",
}


async def decode(data: bytes, field: str, *, max_s: float, expected: str | None = None) -> Samples:
    """Decodes a file to mono float32 samples at 16 kHz, in a thread.

    Args:
        data: The file.
        field: Its place in the request, for errors.
        max_s: Longer audio is refused.
        expected: The format that the caller said it has.

    Raises:
        ApiError: 400 for what is no audio, has an odd rate or too many channels, or is too short; 413 for
            what is too long.
    """
    demuxer = sniff(data)
    if demuxer is None:
        raise ApiError(
            f"{field}: not an audio file; accepted are {', '.join(FORMATS)}", field, code="invalid_audio"
        )
    if expected is not None and FORMATS.get(expected) != demuxer:
        raise ApiError(
            f"{field}: said to be {expected}, but the data is {demuxer}", field, code="invalid_audio"
        )
    return await in_thread(partial(read, data, demuxer, field, max_s))


def sniff(data: bytes) -> str | None:
    """The demuxer for a file, from its first bytes; None for anything unknown."""
    head = data[:16]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mov"
    for magic, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3"), (b"\x1aE\xdf\xa3", "matroska")):
        if head.startswith(magic):
            return name
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "aac" if head[1] & 0xF6 == 0xF0 else "mp3"  # layer bits 00: ADTS
    return None


def read(data: bytes, demuxer: str, field: str, max_s: float, stop: threading.Event) -> Samples:
    """Does what :func:`decode` says, in the caller's thread, until ``stop`` is set."""
    import av

    samples = bytearray()
    limit = int(max_s * SAMPLE_RATE) * 4
    try:
        with av.open(io.BytesIO(data), format=demuxer, options={"protocol_whitelist": "none"}) as container:
            if not container.streams.audio:
                raise ApiError(f"{field}: the file holds no audio", field, code="invalid_audio")
            stream = container.streams.audio[0]
            resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
            for frame in _frames(container, stream, field):
                for piece in resampler.resample(frame):
                    samples += memoryview(piece.planes[0])[: piece.samples * 4]
                if len(samples) > limit:
                    raise ApiError(
                        f"{field}: longer than the {max_s:g} s that are allowed",
                        field,
                        status=413,
                        code="audio_too_long",
                    )
                if stop.is_set():
                    break
    except av.FFmpegError as error:
        raise ApiError(f"{field}: can't be decoded: {error.strerror}", field, code="invalid_audio") from None
    except (ValueError, MemoryError) as error:
        raise ApiError(f"{field}: can't be decoded: {error}", field, code="invalid_audio") from None
    if len(samples) < MIN_S * SAMPLE_RATE * 4:
        raise ApiError(f"{field}: shorter than {MIN_S:g} s", field, code="audio_too_short")
    return np.frombuffer(samples, np.float32)


def _frames(container: Any, stream: Any, field: str) -> Iterator[Any]:
    """The stream's frames and then None (which flushes a resampler), each frame checked."""
    for frame in container.decode(stream):
        if not RATES[0] <= frame.sample_rate <= RATES[1]:
            raise ApiError(
                f"{field}: {frame.sample_rate} Hz; allowed are {RATES[0]} to {RATES[1]}",
                field,
                code="invalid_audio",
            )
        channels = frame.layout.nb_channels
        if not 1 <= channels <= MAX_CHANNELS:
            raise ApiError(
                f"{field}: {channels} channels; at most {MAX_CHANNELS}", field, code="invalid_audio"
            )
        yield frame
    yield None
