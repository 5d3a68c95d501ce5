"""Speech: formats whose bytes are what their label says, one header, effects of speed, and silence."""

from __future__ import annotations

import base64
import io
import json
import struct
import wave
from typing import Any, Literal

import aiohttp
import av
import pytest
from openai import AsyncOpenAI

from broker.client import Client
from broker.gateway.models import OPENAI_VOICES
from tests.gateway.test_bad_requests import SPEECH

WORDS = "one two three four five"
SAMPLES = 5 * 4800

FORMATS = {
    None: ("audio/mpeg", (b"\xff\xf3", b"\xff\xfb")),
    "mp3": ("audio/mpeg", (b"\xff\xf3", b"\xff\xfb")),
    "wav": ("audio/wav", (b"RIFF",)),
    "flac": ("audio/flac", (b"fLaC",)),
    "opus": ("audio/ogg", (b"OggS",)),
    "aac": ("audio/aac", (b"\xff\xf1",)),
}


async def speak(http: aiohttp.ClientSession, **fields: Any) -> tuple[Any, bytes]:
    async with http.post("/v1/audio/speech", json={**SPEECH, "input": WORDS, **fields}) as response:
        data = await response.read()
        assert response.status == 200, data
        return response.headers, data


def length(data: bytes) -> float:
    """Seconds of audio in a file, by decoding all of it."""
    with av.open(io.BytesIO(data)) as container:
        return sum((frame.samples / frame.sample_rate for frame in container.decode(audio=0)), 0.0)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("stream", [None, False])
async def test_the_label_agrees_with_the_bytes(
    http: aiohttp.ClientSession, format_: str | None, stream: bool | None
) -> None:
    headers, data = await speak(http, response_format=format_, stream=stream)
    kind, magics = FORMATS[format_]
    assert headers["Content-Type"].split(";")[0] == kind
    assert data.startswith(magics)
    assert length(data) == pytest.approx(SAMPLES / 24_000, abs=0.1)  # lossy codecs pad
    assert ("Content-Length" in headers) == (stream is False)


async def test_pcm_tells_its_rate(http: aiohttp.ClientSession) -> None:
    headers, data = await speak(http, response_format="pcm")
    assert headers["Content-Type"] == "audio/pcm; rate=24000; channels=1"
    assert len(data) == SAMPLES * 2


async def test_a_streamed_wav_has_one_header_of_unknown_size(http: aiohttp.ClientSession) -> None:
    _, data = await speak(http, response_format="wav")
    assert data.count(b"RIFF") == data.count(b"WAVEfmt ") == 1
    riff, riff_size = struct.unpack("<4sI", data[:8])
    chunk, data_size = struct.unpack("<4sI", data[36:44])
    assert (riff, chunk) == (b"RIFF", b"data")
    assert riff_size == data_size == 0xFFFFFFFF
    assert len(data) - 44 == SAMPLES * 2
    with wave.open(io.BytesIO(data)) as sound:
        assert sound.getframerate() == 24_000
        assert len(sound.readframes(10**9)) == SAMPLES * 2


async def test_a_whole_wav_tells_its_size(http: aiohttp.ClientSession) -> None:
    _, data = await speak(http, response_format="wav", stream=False)
    assert struct.unpack("<I", data[4:8])[0] == len(data) - 8
    assert struct.unpack("<I", data[40:44])[0] == SAMPLES * 2
    _, streamed = await speak(http, response_format="wav")
    assert data[44:] == streamed[44:]


async def test_the_official_client_gets_wav_and_pcm(openai: AsyncOpenAI) -> None:
    sounds = {}
    formats: list[Literal["wav", "pcm"]] = ["wav", "pcm"]
    for format_ in formats:
        answer = await openai.audio.speech.create(
            model="echo",
            voice="nova",
            input=WORDS,
            response_format=format_,
        )
        sounds[format_] = answer.read()
    assert sounds["wav"][44:] == sounds["pcm"]
    async with openai.audio.speech.with_streaming_response.create(
        model="echo", voice="alloy", input=WORDS, response_format="pcm"
    ) as streamed:
        assert b"".join([part async for part in streamed.iter_bytes()]) == sounds["pcm"]


@pytest.mark.parametrize(("speed", "seconds"), [(0.5, 2.0), (1.0, 1.0), (2.0, 0.5), (None, 1.0)])
async def test_speed_changes_the_length(http: aiohttp.ClientSession, speed: float, seconds: float) -> None:
    _, data = await speak(http, response_format="pcm", speed=speed)
    assert len(data) / 48_000 == pytest.approx(seconds)


@pytest.mark.parametrize("voice", [*OPENAI_VOICES, "default", None, {"id": "default"}])
async def test_voices_that_clients_send_work(http: aiohttp.ClientSession, voice: Any) -> None:
    _, data = await speak(http, input="a", response_format="pcm", voice=voice)
    assert data


async def test_events_carry_the_same_bytes(http: aiohttp.ClientSession) -> None:
    headers, body = await speak(http, response_format="pcm", stream_format="sse")
    assert headers["Content-Type"].startswith("text/event-stream")
    *deltas, done = [json.loads(block[6:]) for block in body.decode().split("\n\n")[:-1]]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert sound == (await speak(http, response_format="pcm"))[1]
    assert done["type"] == "speech.audio.done"
    assert done["usage"] == {
        "input_tokens": len(WORDS),
        "output_tokens": 20,
        "total_tokens": len(WORDS) + 20,
    }


@pytest.mark.parametrize("format_", ["wav", "pcm", "mp3", "flac"])
@pytest.mark.parametrize("how", [{}, {"stream": False}, {"stream_format": "sse"}])
async def test_speech_without_a_sample_is_no_empty_success(
    http: aiohttp.ClientSession, broker: Client, format_: str, how: dict[str, Any]
) -> None:
    """Where nothing is spoken (here: what there is to say is cut off) the answer is a 400 in every form."""
    nothing = [{"stop": ["hello"]}, None, None]
    body = {**SPEECH, "input": "hello", "response_format": format_, "sampling_params_list": nothing, **how}
    async with http.post("/v1/audio/speech", json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["param"], error["code"]) == ("input", "nothing_to_speak")
