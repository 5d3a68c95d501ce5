"""Videos that callers upload: frames spread over all of them, upright, within bounds, or refused by name."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from broker.gateway import films
from broker.gateway.errors import ApiError
from broker.gateway.uploads import Pixels
from tests.gateway.test_pictures import JUNK
from tests.gateway.test_uploads import HOSTILE, tone

FIELD = "messages[0].content[1].video_url.url"
BOUNDS = films.Bounds(seconds=10, megapixels=1, fps=2.0, frames=16, frame_mp=0.5, decode_s=60)
KINDS = {"mp4": "libx264", "mov": "libx264", "matroska": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}


def film(
    frames: int = 40,
    rate: int = 20,
    size: tuple[int, int] = (64, 48),
    kind: str = "mp4",
    sound: np.ndarray | None = None,
) -> bytes:
    """A film that goes from black to white; its sound, if any, is at 48 kHz."""
    sink = io.BytesIO()
    with av.open(sink, "w", format=kind) as container:
        stream: Any = container.add_stream(KINDS[kind], rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        heard: Any = container.add_stream("libopus", rate=48_000) if sound is not None else None
        for number in range(frames):
            grey = np.full((size[1], size[0], 3), number * 255 // frames, np.uint8)
            grey[: size[1] // 2, : size[0] // 2] //= 2  # the top left is darker
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            samples = av.AudioFrame.from_ndarray(sound[None], format="flt", layout="mono")
            samples.sample_rate = 48_000
            resampled = av.AudioResampler(format="s16", layout="stereo", rate=48_000).resample(samples)
            for piece in resampled:
                container.mux(heard.encode(piece))
            container.mux(heard.encode(None))
    return sink.getvalue()


async def seen(data: bytes, pixels: float = 10.0, sound_s: float | None = None, **bounds: Any) -> films.Film:
    return await films.decode(data, FIELD, BOUNDS._replace(**bounds), pixels=Pixels(pixels), sound_s=sound_s)


async def refused(data: bytes, status: int = 400, **bounds: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await seen(data, **bounds)
    assert (caught.value.status, caught.value.param) == (status, FIELD), caught.value.message
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_frames_are_spread_from_the_first_to_the_last(kind: str) -> None:
    """Two seconds at two frames a second: number 0, 13, 26 and 39 of 40."""
    found = await seen(film(kind=kind))
    assert found.frames.shape == (4, 48, 64, 3)
    assert found.frames.dtype == np.uint8
    assert found.fps == pytest.approx(2.0)
    assert found.sound is None
    middles = found.frames[:, -8:, -8:].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(middles, [number * 255 // 40 for number in (0, 13, 26, 39)], atol=4)


@pytest.mark.parametrize(
    ("total", "seconds", "fps", "most", "wanted"),
    [
        (1, 0.04, 2.0, 64, [0]),
        (2, 0.08, 2.0, 64, [0, 1]),
        (3, 0.12, 2.0, 64, [0, 2]),
        (25, 1.0, 2.0, 64, [0, 8, 16, 24]),  # at least four
        (250, 10.0, 0.5, 64, [0, 83, 166, 249]),
        (250, 10.0, 0.7, 64, [0, 50, 100, 149, 199, 249]),  # seven would be odd
        (250, 10.0, 2.0, 5, [0, 83, 166, 249]),
        (250, 10.0, 30.0, 1, [0]),
    ],
)
def test_which_frames_are_kept(total: int, seconds: float, fps: float, most: int, wanted: list[int]) -> None:
    assert films.chosen(total, seconds, fps, most).tolist() == wanted


async def test_settings_choose_the_frames() -> None:
    data = film()
    assert (await seen(data, fps=5.0)).frames.shape[0] == 10
    few = await seen(data, fps=5.0, frames=6)
    assert few.frames.shape[0] == 6
    assert few.fps == pytest.approx(3.0)


async def test_large_frames_shrink_and_keep_their_form() -> None:
    assert (await seen(film(4, size=(640, 320)), frame_mp=0.0512)).frames.shape == (4, 160, 320, 3)


async def test_a_film_of_one_frame() -> None:
    assert (await seen(film(1))).frames.shape == (1, 48, 64, 3)


@pytest.mark.parametrize("degrees", [90, 180, 270])
async def test_a_telephone_that_was_turned(degrees: int) -> None:
    """The matrix in the film's header says how players turn it clockwise."""
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", cos << 16, sin << 16, 0, -sin << 16, cos << 16, 0, 0, 0, 1 << 30)
    data = film(4)
    at = data.index(upright, data.index(b"tkhd"))
    expected = np.rot90((await seen(data)).frames, -degrees // 90, axes=(1, 2))
    found = (await seen(data[:at] + turned + data[at + 36 :])).frames
    np.testing.assert_array_equal(found, expected)


async def test_a_films_own_sound() -> None:
    data = film(sound=tone(2.0, 48_000), kind="webm")
    assert (await seen(data)).sound is None
    sound = (await seen(data, sound_s=5.0)).sound
    assert sound is not None
    assert sound.dtype == np.float32
    assert len(sound) == pytest.approx(32_000, abs=400)
    middle = sound[8_000:24_000]
    assert np.abs(np.fft.rfft(middle)).argmax() == pytest.approx(440, abs=3)
    assert (await refused(data, 413, sound_s=1.0)).code == "audio_too_long"
    assert "no audio" in (await refused(film(), sound_s=5.0)).message


async def test_a_size_that_changes_on_the_way_stays_the_first() -> None:
    """VP9 may do so at each key frame; here two films lie one behind the other in one container."""
    parts = [film(20, kind="webm"), film(20, size=(128, 96), kind="webm")]
    sink = io.BytesIO()
    with av.open(sink, "w", format="webm") as container, av.open(io.BytesIO(parts[0])) as first:
        stream = container.add_stream_from_template(first.streams.video[0])
        for number, part in enumerate(parts):
            with av.open(io.BytesIO(part)) as source:
                for packet in source.demux(video=0):
                    if packet.size and packet.pts is not None:
                        packet.pts += number * 1000
                        packet.dts = packet.pts
                        packet.stream = stream
                        container.mux(packet)
    data = sink.getvalue()
    found = await seen(data)
    assert found.frames.shape == (4, 48, 64, 3)
    assert found.frames[-1].mean() > 200, "the second film's end"
    assert (await refused(data, 400, megapixels=0.004)).code == "invalid_video"


MP4 = film()

HOSTILE_FILMS = {
    **{name: HOSTILE[name] for name in ("empty", "random", "a playlist", "a concat list", "text")},
    "mp4 magic, then noise": b"\0\0\0\x20ftypisom" + JUNK,
    "webm magic, then noise": b"\x1aE\xdf\xa3" + JUNK,
    "avi magic, then noise": b"RIFF\0\0\1\0AVI " + JUNK,
    "an mp4 less its index": MP4[: MP4.index(b"moov")],
    "a codec that nobody knows": film(kind="matroska").replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/XYZ"),
    "an mp4 of zeros": MP4[:48] + bytes(len(MP4) - 48),
}


@pytest.mark.parametrize("name", HOSTILE_FILMS)
async def test_hostile_films_are_refused(name: str) -> None:
    assert (await refused(HOSTILE_FILMS[name])).code == "invalid_video"


async def test_sound_alone_is_no_film() -> None:
    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(tone(0.5)[None], format="flt", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert "no video" in (await refused(sink.getvalue())).message


async def test_a_cut_film_shows_what_there_is() -> None:
    data = film(kind="matroska")
    found = await seen(data[: len(data) * 2 // 3])
    assert 2 <= len(found.frames) <= 4
    assert found.frames[-1].mean() < 200


async def test_bounds_are_refused_with_their_numbers() -> None:
    data = film()
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"seconds": 1.5}, "1.5 s", "video_too_long"),
        ({"seconds": 0.1}, "0.1 s", "video_too_long"),
        ({"megapixels": 0.003}, "0.003 megapixels", "video_too_large"),
        ({"decode_s": 1e-9}, "in 1e-09 s", "video_too_large"),
        ({"pixels": 0.012}, "0.012 megapixels", "too_many_pixels"),
    ]
    for bounds, words, code in rows:
        error = await refused(data, 413, **bounds)
        assert words in error.message
        assert error.code == code
    assert (await seen(data, pixels=0.0123)).frames.size == 4 * 64 * 48 * 3


async def test_a_reader_that_is_told_to_stop_reads_no_more() -> None:
    stop = threading.Event()
    stop.set()
    reader = films._Reader(film(), "mov", FIELD, BOUNDS)
    found = reader.film(Pixels(10), None, stop)
    assert len(found.frames) == 1


_BOMB = """
import asyncio, resource, sys
from broker.gateway import films
from broker.gateway.uploads import Pixels

async def main():
    small, large = (open(path, "rb").read() for path in sys.argv[1:])
    bounds = films.Bounds(60, 9, 2.0, 16, 0.05, 60)
    await films.decode(small, "f", bounds, pixels=Pixels(10))  # libraries are loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    film = await films.decode(large, "f", bounds, pixels=Pixels(10))
    print(len(film.frames), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""


def test_a_long_film_takes_the_memory_of_what_is_kept(tmp_path: Path) -> None:
    """60 frames of 1280 x 720 are 166 MB; 16 small ones are kept."""
    for name, data in (("small", film(kind="avi")), ("large", film(60, 5, (1280, 720), "avi"))):
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-P", "-c", _BOMB, str(tmp_path / "small"), str(tmp_path / "large")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    frames, grown_kb = map(int, result.stdout.split())
    assert frames == 16
    assert grown_kb < 80_000
