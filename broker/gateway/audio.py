"""Speech to bytes: float samples become 16 bit and then WAV, PCM or a compressed format, piece by piece."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

UNKNOWN_SIZE = 0xFFFFFFFF  #: in a WAV header: "until the end"

Samples = npt.NDArray[np.floating[Any]]

#: Format -> content type. PCM names its rate, see :func:`content_type`.
CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
}

# Format -> FFmpeg's muxer, encoder, its options and the muxer's. Nothing may need a seek back, and what is
# encoded leaves at once.
_COMPRESSED: dict[str, tuple[str, str, dict[str, str]]] = {
    "flac": ("flac", "flac", {}),
    "mp3": ("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("ogg", "libopus", {"page_duration": "100000", "fflags": "bitexact"}),
    "aac": ("adts", "aac", {}),
}


def content_type(name: str, sample_rate: int) -> str:
    """The Content-Type of a format at a rate."""
    kind = CONTENT_TYPES[name]
    return f"{kind}; rate={sample_rate}; channels=1" if kind == "audio/pcm" else kind


def to_int16(samples: Samples) -> bytes:
    """Float samples in [-1, 1] as little-endian 16 bit; what lies outside is clipped."""
    data: bytes = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
    return data


def wav_header(sample_rate: int, data_bytes: int | None) -> bytes:
    """The 44 bytes before mono 16 bit samples; ``data_bytes`` None: of a length not known yet."""
    riff, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if data_bytes is None else (36 + data_bytes, data_bytes)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1),
        *(sample_rate, sample_rate * 2, 2, 16, b"data", data),
    )


class Encoder(Protocol):
    """Takes samples in order and gives bytes as soon as there are any."""

    async def feed(self, samples: Samples) -> bytes:
        """More samples, 1-D."""
        ...

    async def finish(self) -> bytes:
        """What is left at the end."""
        ...


class Pcm:
    """16 bit samples; as WAV with a header before them."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header

    async def feed(self, samples: Samples) -> bytes:
        """See :class:`Encoder`."""
        header, self._header = self._header, b""
        return header + to_int16(samples)

    async def finish(self) -> bytes:
        """See :class:`Encoder`. Even without any sample a WAV has its header."""
        header, self._header = self._header, b""
        return header


class WholeWav:
    """A WAV file with its true sizes, which are known at the end only."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        self._data = bytearray()

    async def feed(self, samples: Samples) -> bytes:
        """Keeps them."""
        self._data += to_int16(samples)
        return b""

    async def finish(self) -> bytes:
        """The whole file."""
        return wav_header(self._sample_rate, len(self._data)) + bytes(self._data)


class _Sink:
    """The file that a muxer writes to: it can't seek, so the muxer doesn't try."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        """What has been written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


class Compressed:
    """FLAC, MP3, Opus in Ogg or AAC in ADTS, encoded in a thread."""

    def __init__(self, name: str, sample_rate: int) -> None:
        import av

        muxer, codec, options = _COMPRESSED[name]
        self._sink = _Sink()
        self._container = av.open(self._sink, "w", format=muxer, options={"flush_packets": "1", **options})
        self._rate = sample_rate
        self._stream = self._container.add_stream(codec, rate=_supported(av.Codec(codec, "w"), sample_rate))
        self._stream.layout = "mono"

    async def feed(self, samples: Samples) -> bytes:
        """See :class:`Encoder`."""
        return await asyncio.to_thread(self._feed, samples) if len(samples) else b""

    async def finish(self) -> bytes:
        """See :class:`Encoder`."""
        return await asyncio.to_thread(self._finish)

    def _feed(self, samples: Samples) -> bytes:
        import av

        frame = av.AudioFrame(format="s16", layout="mono", samples=len(samples))
        frame.planes[0].update(to_int16(samples).ljust(frame.planes[0].buffer_size, b"\0"))
        frame.sample_rate = self._rate
        self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def _finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()


def _supported(codec: Any, sample_rate: int) -> int:
    """The encoder's lowest rate that loses nothing, else its highest."""
    rates: list[int] = sorted(codec.audio_rates or [sample_rate])
    return next((rate for rate in rates if rate >= sample_rate), rates[-1])


def encoder(name: str, sample_rate: int, *, whole: bool = False) -> Encoder:
    """An encoder for one answer.

    Args:
        name: A key of :data:`CONTENT_TYPES`.
        sample_rate: Hz of the samples.
        whole: The bytes are wanted at the end only, so a WAV header can tell the true sizes.
    """
    if name == "wav":
        return WholeWav(sample_rate) if whole else Pcm(wav_header(sample_rate, None))
    if name in _COMPRESSED:
        return Compressed(name, sample_rate)
    return Pcm()
