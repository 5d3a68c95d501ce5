"""Audio that callers upload: decoded within bounds, or refused with the place of the part at fault."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import struct
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from broker.gateway import media
from broker.gateway.audio import encoder, wav_header
from broker.gateway.errors import ApiError
from broker.gateway.messages import to_payload
from broker.gateway.models import Model
from broker.gateway.schemas import AudioLinkPart, AudioPart, ChatMessage, InputAudio, Link, TextPart
from broker.gateway.settings import Settings
from pipelines.graph import REQUEST, Edge, Endpoint, Pipeline, Stage


def tone(seconds: float, rate: int = 16_000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


async def file(format_: str, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    out = encoder(format_, rate, whole=True)
    return await out.feed(tone(seconds, rate)) + await out.finish()


def flac(rate: int, channels: int, seconds: float) -> bytes:
    """A FLAC file of silence with any rate and number of channels."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=rate, options={"strict": "experimental"})
        stream.layout = {1: "mono", 2: "stereo", 8: "7.1"}[channels]
        frame = av.AudioFrame(format="s16", layout=stream.layout, samples=round(rate * seconds))
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return sink.getvalue()


@pytest.mark.parametrize("format_", ["wav", "flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000])
async def test_formats_become_mono_floats_at_16_khz(format_: str, rate: int) -> None:
    samples = await media.decode(await file(format_, 1.0, rate), "file", max_s=10, expected=format_)
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(16_000, abs=2_500)  # lossy codecs pad
    middle = samples[6_000:10_000]
    assert np.abs(np.fft.rfft(middle)).argmax() * 16_000 / len(middle) == pytest.approx(440, abs=5)
    assert 0.4 < np.abs(middle).max() < 0.6


async def test_a_wav_at_the_right_rate_keeps_its_samples() -> None:
    samples = await media.decode(await file("wav"), "file", max_s=10)
    assert np.abs(samples - tone(1.0)).max() < 1 / 32_000


async def test_stereo_is_mixed_down() -> None:
    assert len(await media.decode(flac(44_100, 2, 0.5), "file", max_s=10)) == pytest.approx(8_000, abs=50)


NOISE = random.Random(7).randbytes(4_000)

HOSTILE = {
    "empty": b"",
    "random": NOISE[:64],
    "text": b"hello, this is no audio at all" * 10,
    "wav header alone": wav_header(16_000, 0),
    "wav of 23 ms": wav_header(16_000, 736) + bytes(736),
    "wav cut in its header": wav_header(16_000, 0)[:30],
    "rate 0": wav_header(0, 96_000) + bytes(96_000),
    "rate 1": wav_header(1, 96_000) + bytes(96_000),
    "rate 7999": wav_header(7_999, 96_000) + bytes(96_000),
    "rate 192001": wav_header(192_001, 96_000) + bytes(96_000),
    "no channel": wav_header(16_000, 96_000)[:22] + b"\0\0" + wav_header(16_000, 96_000)[24:] + bytes(96_000),
    "65535 channels": wav_header(16_000, 96_000)[:22]
    + b"\xff\xff"
    + wav_header(16_000, 9)[24:]
    + bytes(9_000),
    "flac magic, then noise": b"fLaC" + NOISE,
    "ogg magic, then noise": b"OggS" + NOISE,
    "mp4 magic, then noise": b"\0\0\0\x20ftypisom" + NOISE,
    "webm magic, then noise": b"\x1aE\xdf\xa3" + NOISE,
    "a playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "a concat list": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files_are_refused(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        await media.decode(HOSTILE[name], "messages[0].content[1]", max_s=10)
    assert refused.value.status == 400
    assert refused.value.param == "messages[0].content[1]"


async def test_a_rate_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ApiError, match="655350"):
        await media.decode(flac(655_350, 8, 0.2), "file", max_s=10)


async def test_a_header_that_claims_gigabytes_costs_what_is_there() -> None:
    data = wav_header(16_000, 4 * 2**30 - 37) + (await file("wav"))[44:]
    assert len(await media.decode(data, "file", max_s=10)) == 16_000


async def test_the_limit_counts_decoded_seconds() -> None:
    with pytest.raises(ApiError) as refused:
        await media.decode(await file("opus", 12.0), "file", max_s=10)
    assert refused.value.status == 413


async def test_a_label_that_the_bytes_contradict_is_refused() -> None:
    with pytest.raises(ApiError, match="said to be wav"):
        await media.decode(await file("opus"), "file", max_s=10, expected="wav")


_BOMB = """
import asyncio, resource, struct, sys
from broker.gateway import media
from broker.gateway.errors import ApiError

async def main():
    data = open(sys.argv[1], "rb").read()
    await media.decode(data[: len(data) // 600], "f", max_s=600)  # libraries are loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        await media.decode(data, "f", max_s=600)
    except ApiError as error:
        print(error.status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""


def test_hours_in_a_small_file_take_bounded_memory(tmp_path: Path) -> None:
    """Ten hours of silence in a few megabytes would be 2.3 GB of samples; ten minutes are allowed."""
    path = tmp_path / "bomb.aac"
    path.write_bytes(asyncio.run(file("aac", 60.0, 8_000)) * 600)  # ADTS frames stand by themselves
    result = subprocess.run(
        [sys.executable, "-P", "-c", _BOMB, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    status, grown_kb = map(int, result.stdout.split())
    assert status == 413
    assert grown_kb < 120_000, "twice the samples of ten minutes, at most"


# --- parts of messages

VOICE = Model(
    Pipeline(
        "voice",
        {"text": "ears"},
        {"ears": Stage("function", when="audio")},
        [Edge(REQUEST, "ears")],
        {"chat": Endpoint(outputs=["text"])},
    ),
    0,
)


async def place(part: AudioPart | AudioLinkPart) -> tuple[str | None, int]:
    """Where a part's error is said to be, and with what status; None: there is none."""
    message = ChatMessage("user", [TextPart("listen"), part])
    try:
        payload = await to_payload([message], VOICE, Settings(max_audio_mb=0.1, max_audio_s=10))
    except ApiError as error:
        return error.param, error.status
    assert payload["messages"][0]["content"][1] == {"type": "audio", "index": 0}
    assert len(payload["audio"]) == 1
    return None, 200


async def test_where_base64_may_be_wrong() -> None:
    data = base64.b64encode(await file("wav")).decode()
    ogg = base64.b64encode(await file("opus")).decode()
    there = "messages[0].content[1].input_audio"
    rows = [
        (data, "wav", None, 200),
        (f"data:audio/wav;base64,{data}", "wav", None, 200),
        (f"data:;base64,{data}", "wav", None, 200),
        (data[:100] + "!!!" + data[100:], "wav", f"{there}.data", 400),
        (data.rstrip("=")[:-1], "wav", f"{there}.data", 400),
        (data + "====", "wav", f"{there}.data", 400),
        ("", "wav", f"{there}.data", 400),
        (f"data:audio/wav,{data}", "wav", f"{there}.data", 400),
        ("data:audio/wav;base64", "wav", f"{there}.data", 400),
        ("file:///etc/passwd", "wav", f"{there}.data", 400),
        ("/etc/passwd", "wav", f"{there}.data", 400),
        ("http://127.0.0.1/a.wav", "wav", f"{there}.data", 400),
        (ogg, "wav", f"{there}.data", 400),
        (ogg, "opus", None, 200),
        (data, "exe", f"{there}.format", 400),
        (base64.b64encode(bytes(64)).decode(), "wav", f"{there}.data", 400),
        (base64.b64encode(bytes(200_000)).decode(), "wav", f"{there}.data", 413),
    ]
    for text, format_, param, status in rows:
        part = AudioPart(InputAudio(text, format_))
        assert await place(part) == (param, status), text[:40]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "http://2130706433/",
        "https://example.com/a.wav",
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://x/y",
        "",
    ],
)
async def test_links_are_never_followed(url: str) -> None:
    assert await place(AudioLinkPart(Link(url))) == ("messages[0].content[1].audio_url.url", 400)


async def test_a_data_uri_is_taken_as_a_link() -> None:
    data = base64.b64encode(await file("mp3")).decode()
    assert await place(AudioLinkPart(Link(f"data:audio/mpeg;base64,{data}"))) == (None, 200)


async def test_all_clips_of_a_request_share_the_seconds() -> None:
    part = AudioPart(InputAudio(base64.b64encode(await file("opus", 6.0)).decode(), "opus"))
    with pytest.raises(ApiError) as refused:
        await to_payload([ChatMessage("user", [part, part])], VOICE, Settings(max_audio_s=10))
    assert refused.value.status == 413
    assert refused.value.param is not None
    assert refused.value.param.startswith("messages[0].content[1]")


def test_a_riff_size_is_never_believed() -> None:
    assert struct.unpack("<I", wav_header(16_000, None)[40:44])[0] == 0xFFFFFFFF
    assert media.sniff(wav_header(16_000, None)) == "wav"
