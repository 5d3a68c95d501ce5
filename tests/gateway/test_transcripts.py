"""Transcripts: the forms they come in, and the form that asks for them.

The pipeline `digest` stands in for a recogniser: the same samples give the same "text".
"""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from broker.gateway.audio import to_int16, wav_header
from broker.gateway.transcript import Transcript
from tests.gateway.test_uploads import tone


def transcript() -> Transcript:
    made = Transcript(3_725.5, None)
    assert (
        made.add({"index": 0, "text": " Hello <you>. ", "start": 0.0, "end": 1.5, "language": "en"})
        == "Hello <you>."
    )
    assert made.add({"index": 0, "text": "", "start": 1.5, "end": 2.0}) == ""
    assert made.add({"index": 0, "text": "A & B", "start": 3_661.0, "end": 3_725.4999}) == " A & B"
    assert made.add({"index": 0, "text": "", "done": True, "language": "en", "duration": 3_725.5}) == ""
    return made


def test_text_is_joined_from_segments() -> None:
    assert transcript().text == "Hello <you>. A & B"


def test_subrip() -> None:
    assert transcript().srt() == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello <you>.\n\n2\n01:01:01,000 --> 01:02:05,500\nA & B\n\n"
    )


def test_webvtt_escapes_what_would_be_markup() -> None:
    assert transcript().vtt() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello &lt;you&gt;.\n\n"
        "01:01:01.000 --> 01:02:05.500\nA &amp; B\n\n"
    )


def test_verbose_json() -> None:
    body = transcript().verbose(segments=True)
    assert body["language"] == "en"
    assert body["duration"] == 3_725.5
    assert [(s.id, s.start) for s in body["segments"]] == [(0, 0.0), (1, 3_661.0)]
    assert "segments" not in transcript().verbose(segments=False)


def test_usage_counts_audio_by_the_tenth_of_a_second() -> None:
    assert transcript().duration() == {"type": "duration", "seconds": 3_725.5}
    usage = transcript().tokens()
    assert usage["input_tokens"] == 37_255
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_silence_gives_valid_empty_files() -> None:
    silent = Transcript(1.0, "en")
    assert (silent.text, silent.srt(), silent.vtt()) == ("", "", "WEBVTT\n\n")


def clip() -> bytes:
    samples = to_int16(tone(0.5))
    return wav_header(16_000, len(samples)) + samples


def form(file: bytes | None = None, **fields: Any) -> aiohttp.FormData:
    made = aiohttp.FormData()
    for name, value in {"model": "digest", **fields}.items():
        made.add_field(name.replace("__", "[]"), value)
    made.add_field("file", clip() if file is None else file, filename="clip.wav")
    return made


async def test_the_official_client_gets_transcripts(openai: AsyncOpenAI) -> None:
    ask = openai.audio.transcriptions.create
    heard = (await ask(model="digest", file=("a.wav", clip()))).text
    assert len(heard) == 8
    verbose = await ask(model="digest", file=("a.wav", clip()), response_format="verbose_json")
    assert (verbose.text, verbose.duration) == (heard, 0.5)
    assert verbose.segments is not None
    assert [segment.text for segment in verbose.segments] == [heard]
    assert await ask(model="digest", file=("a.wav", clip()), response_format="text") == f"{heard}\n"
    assert "00:00:00,000 --> 00:00:00,500" in await ask(
        model="digest", file=("a.wav", clip()), response_format="srt"
    )
    events = [event async for event in await ask(model="digest", file=("a.wav", clip()), stream=True)]
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == heard


async def test_the_samples_are_what_the_chat_hears_too(http: aiohttp.ClientSession) -> None:
    """A clip in a message reaches the stage; another clip gives another answer."""

    async def ask(data: bytes) -> str:
        part = {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"},
        }
        body = {"model": "digest", "messages": [{"role": "user", "content": [part]}]}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 5
        text: str = answer["choices"][0]["message"]["content"]
        return text

    assert await ask(clip()) == await ask(clip())
    assert await ask(clip()) != await ask(clip()[:-2] + b"xx")


ROWS: list[tuple[aiohttp.FormData, str | None, int]] = [
    (form(model="nobody"), "model", 404),
    (form(model="echo"), "model", 400),  # it hears nothing
    (form(file=b""), "file", 400),
    (form(file=b"x" * (1 << 20) + b"y"), "file", 413),
    (form(response_format="pdf"), "response_format", 400),
    (form(temperature="hot"), "temperature", 400),
    (form(temperature="2"), "temperature", 400),
    (form(language="English!"), "language", 400),
    (form(stream="perhaps"), "stream", 400),
    (form(timestamp_granularities__="word"), "timestamp_granularities[0]", 400),
    (form(prompt="p" * 100_000), "prompt", 413),
]


@pytest.mark.parametrize("number", range(len(ROWS)))
async def test_bad_fields_of_the_form_are_named(http: aiohttp.ClientSession, number: int) -> None:
    data, param, status = ROWS[number]
    async with http.post("/v1/audio/transcriptions", data=data) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (status, param), error


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"no boundary"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"--x\r\nno head\r\n\r\necho\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\nA\x00: b\r\n\r\necho\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\nA: " + b"b" * 20_000 + b"\r\n\r\necho\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: b\r\n" * 500 + b"\r\necho\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\n"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nhello',
        ),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: nonsense\r\n\r\nhello\r\n--x--\r\n",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\r\n--x--\r\n',
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * 100 + b"--x--\r\n",
        ),
        ("multipart/mixed; boundary=x", b"--x\r\n\r\nhello\r\n--x--\r\n"),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\n\r\nz\r\n--y--\r\n--x--\r\n",
        ),
    ],
)
async def test_what_is_no_form_is_refused(http: aiohttp.ClientSession, kind: str, body: bytes) -> None:
    async with http.post("/v1/audio/transcriptions", data=body, headers={"Content-Type": kind}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]
