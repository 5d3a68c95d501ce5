"""A question goes in, text and speech come out, made by real models in real processes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import signal
from typing import Any

import numpy as np
import openai
import pytest

from broker.client import Client
from tests.e2e.conftest import START_S, House, samples, word_errors, words

pytestmark = [pytest.mark.models, pytest.mark.asyncio(loop_scope="function")]

PARIS = "What is the capital of France?"
STORY = "Tell me about the sea in four sentences."
TRIES = 3
QUESTIONS = [
    PARIS,
    "Why is the sky blue?",
    "What do bees make?",
    "Name three colours.",
    "How do you boil an egg?",
    "Who wrote Romeo and Juliet?",
    "What is a good breakfast?",
    "Describe the moon in one sentence.",
    "Why do people sleep?",
    "What is snow made of?",
]


def chat(question: str, **more: Any) -> dict[str, Any]:
    """Arguments of a chat request, greedy and seeded."""
    message = {"role": "user", "content": question}
    return {"model": "voice", "messages": [message], "temperature": 0, "seed": 5, "max_tokens": 60, **more}


def spoken(question: str, form: str = "pcm16", **more: Any) -> dict[str, Any]:
    """Arguments of a chat request for text and speech."""
    audio = {"voice": "alloy", "format": form}
    return chat(question, modalities=["text", "audio"], audio=audio, **more)


def audio_of(delta: Any) -> bytes:
    """The audio bytes of one streamed delta."""
    audio = getattr(delta, "audio", None)
    return base64.b64decode((getattr(audio, "data", None) or "") if audio else "")


async def joined(stream: Any) -> tuple[str, bytes, list[Any]]:
    """A streamed answer's text, audio bytes and chunks."""
    text, audio, chunks = "", b"", []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            audio += audio_of(choice.delta)
    return text, audio, chunks


async def hear(client: openai.AsyncOpenAI, audio: bytes) -> str:
    """What Whisper understands of a WAV file."""
    answer = await client.audio.transcriptions.create(model="voice", file=("a.wav", audio), language="en")
    return answer.text


async def attempts(broker: Client) -> dict[str, int]:
    """How many attempts each stage has seen."""
    status = await broker.inspect("status")
    stages = status["pipelines"]["voice"]["stages"]
    return {name: stage["tasks"]["attempts"] for name, stage in stages.items()}


async def code2wav(broker: Client) -> dict[str, Any]:
    """What the broker knows of the vocoder's stage."""
    status = await broker.inspect("status")
    stage: dict[str, Any] = status["pipelines"]["voice"]["stages"]["code2wav"]
    return stage


async def empty(broker: Client) -> None:
    """Waits for the broker's tables to be empty."""
    async with asyncio.timeout(60):
        while any((await broker.inspect("status"))["tables"].values()):
            await asyncio.sleep(0.05)


async def test_the_answer_is_right_in_text_and_in_speech(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**spoken(PARIS, "wav"))
    message = answer.choices[0].message
    assert "Paris" in (message.content or message.audio.transcript)
    assert "paris" in words(await hear(client, base64.b64decode(message.audio.data)))


async def test_speech_says_what_the_text_says(client: openai.AsyncOpenAI) -> None:
    errors = total = 0
    for question in QUESTIONS:
        answer = await client.chat.completions.create(**spoken(question, "wav", max_tokens=40))
        audio = answer.choices[0].message.audio
        said = words(audio.transcript)
        errors += word_errors(said, words(await hear(client, base64.b64decode(audio.data))))
        total += len(said)
    assert total > 100
    assert errors / total <= 0.15, f"{errors} wrong of {total} words"


async def test_streamed_audio_equals_unstreamed_audio_sample_for_sample(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**spoken(STORY, "wav"))
    stream = await client.chat.completions.create(**spoken(STORY), stream=True)
    text, audio, chunks = await joined(stream)
    message = whole.choices[0].message
    assert text in (message.content, message.audio.transcript)
    assert np.array_equal(np.frombuffer(audio, np.int16), samples(base64.b64decode(message.audio.data)))
    finishes = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert finishes in (["stop"], ["length"])


async def test_speech_as_wav_and_pcm_streamed_and_whole_are_the_same_samples(
    client: openai.AsyncOpenAI,
) -> None:
    text = "The sea is wide and blue. Ships sail on it, day and night. Fish live in it."
    arguments: dict[str, Any] = {"model": "voice", "voice": "alloy", "input": text, "extra_body": {"seed": 3}}
    wav = (await client.audio.speech.create(**arguments, response_format="wav")).content
    async with client.audio.speech.with_streaming_response.create(
        **arguments, response_format="wav"
    ) as answer:
        pieces = [piece async for piece in answer.iter_bytes()]
    async with client.audio.speech.with_streaming_response.create(
        **arguments, response_format="pcm"
    ) as answer:
        pcm = b"".join([piece async for piece in answer.iter_bytes()])
    streamed = b"".join(pieces)
    assert streamed.count(b"RIFF") == 1
    assert wav.count(b"RIFF") == 1
    assert np.array_equal(np.frombuffer(streamed[44:], np.int16), np.frombuffer(pcm, np.int16))
    assert np.array_equal(np.frombuffer(wav[44:], np.int16), np.frombuffer(pcm, np.int16))


async def test_first_audio_leaves_before_the_last_text_token(client: openai.AsyncOpenAI) -> None:
    arguments = spoken(STORY, max_tokens=120, extra_body={"metrics": True})
    for _ in range(TRIES):  # the text may overtake a vocoder that stands still for a moment
        _, _, chunks = await joined(await client.chat.completions.create(**arguments, stream=True))
        kinds = [getattr(chunk, "modality", None) for chunk in chunks if chunk.choices]
        audio_came_meanwhile = "audio" in kinds[: len(kinds) - kinds[::-1].index("text")]
        metrics = next(chunk.metrics for chunk in reversed(chunks) if getattr(chunk, "metrics", None))
        stages = metrics["stage_metrics"]
        ahead_s = stages["thinker"]["last_chunk_s"] - stages["code2wav"]["first_chunk_s"]
        if audio_came_meanwhile and ahead_s > 0:
            break
    assert audio_came_meanwhile, "audio came while text still did"
    assert ahead_s > 0


async def test_a_text_request_never_schedules_the_speaking_stages(
    client: openai.AsyncOpenAI, broker: Client
) -> None:
    before = await attempts(broker)
    await client.chat.completions.create(**chat(PARIS, modalities=["text"]))
    after = await attempts(broker)
    assert after["thinker"] == before["thinker"] + 1
    assert {s: after[s] for s in ("ears", "talker", "code2wav")} == {
        s: before[s] for s in ("ears", "talker", "code2wav")
    }


async def test_a_spoken_question_is_understood(client: openai.AsyncOpenAI) -> None:
    speech = await client.audio.speech.create(
        model="voice", voice="alloy", input=PARIS, response_format="wav"
    )
    clip = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(speech.content).decode(), "format": "wav"},
    }
    answer = await client.chat.completions.create(**chat([clip]))  # type: ignore[arg-type]
    assert "Paris" in answer.choices[0].message.content


async def test_the_same_seed_gives_the_same_sampled_answer(client: openai.AsyncOpenAI) -> None:
    arguments = chat(STORY, temperature=1.0, max_tokens=30)
    one, two = [await client.chat.completions.create(**arguments) for _ in range(2)]
    other = await client.chat.completions.create(**{**arguments, "seed": 6})
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.choices[0].message.content != other.choices[0].message.content


async def test_a_vocoder_killed_in_mid_stream_changes_no_sample(
    voice: House, client: openai.AsyncOpenAI, broker: Client
) -> None:
    _, undisturbed, _ = await joined(await client.chat.completions.create(**spoken(STORY), stream=True))
    before = (await code2wav(broker))["tasks"]["deaths"]
    for _ in range(TRIES):  # it may have done all of its work before we come to kill it
        audio, busy = b"", []
        async for chunk in await client.chat.completions.create(**spoken(STORY), stream=True):
            for choice in chunk.choices:
                audio += audio_of(choice.delta)
            if audio and not busy:
                busy = [worker for worker in (await code2wav(broker))["workers"] if worker["running"]]
                for worker in busy:
                    os.kill(worker["pid"], signal.SIGKILL)
        assert audio == undisturbed
        if (await code2wav(broker))["tasks"]["deaths"] > before:
            break
        await asyncio.to_thread(voice.wait_until_ready)
    assert (await code2wav(broker))["tasks"]["deaths"] > before


@pytest.mark.parametrize("when", ["text", "speech"])
async def test_a_broker_killed_in_the_middle_of_a_spoken_answer_leaves_no_trace_in_it(
    voice: House, client: openai.AsyncOpenAI, when: str
) -> None:
    asked = spoken(STORY)
    text, undisturbed, _ = await joined(await client.chat.completions.create(**asked, stream=True))
    killed = False
    said, audio = "", b""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            said += choice.delta.content or ""
            audio += audio_of(choice.delta)
        if not killed and (audio if when == "speech" else len(said) > 20):
            killed = True
            os.kill(voice.process_of("broker.server"), signal.SIGKILL)
    assert killed
    assert said == text
    assert audio == undisturbed


async def test_a_second_vocoder_joins_works_and_leaves_without_loss(
    voice: House, client: openai.AsyncOpenAI, broker: Client
) -> None:
    async def ask(number: int) -> int:
        arguments = spoken(QUESTIONS[number % len(QUESTIONS)], "wav", max_tokens=40)
        answer = await client.chat.completions.create(**arguments)
        return len(samples(base64.b64decode(answer.choices[0].message.audio.data)))

    numbers = itertools.count()
    stop = asyncio.Event()

    async def keep_asking() -> list[int]:
        lengths = []
        while not stop.is_set():
            lengths.append(await ask(next(numbers)))
        return lengths

    async def workers() -> list[dict[str, Any]]:
        return (await code2wav(broker))["workers"]  # type: ignore[no-any-return]

    async def until(condition: Any) -> None:
        async with asyncio.timeout(START_S):
            while not condition(await workers()):
                await asyncio.sleep(0.02)

    asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
    first = {w["pid"] for w in await workers()}
    guardian = voice.worker("code2wav")
    await until(lambda all_: any(w["pid"] not in first and w["running"] for w in all_))
    guardian.terminate()
    await asyncio.to_thread(guardian.wait, 60)
    await until(lambda all_: {w["pid"] for w in all_} <= first)
    stop.set()
    lengths = await asyncio.gather(*asking)
    assert all(length > 0 for each in lengths for length in each)
    assert guardian.returncode == 0


async def test_two_hundred_callers_that_leave_are_forgotten(
    client: openai.AsyncOpenAI, broker: Client
) -> None:
    async def leave(number: int) -> None:
        arguments = spoken(STORY, stream=True, seed=number, max_tokens=200)
        try:
            async with asyncio.timeout(0.2 + number % 5 * 0.3):
                async for _ in await client.chat.completions.create(**arguments):
                    pass
        except (TimeoutError, openai.APITimeoutError):
            return

    for start in range(0, 200, 20):
        await asyncio.gather(*(leave(number) for number in range(start, start + 20)))
    await empty(broker)
