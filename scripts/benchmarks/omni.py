"""Qwen-Omni as four stages against transformers' generate: text and speech for requests that come at once.

Both sides have the same random weights, read the same conversations, system prompt included, and give each
request the same number of tokens and frames, greedy.
The baseline is what transformers offers for spoken answers: one ``generate`` after the other, here in one
process with all cores; a request's completion time counts from when all of them were there. The served side
is `omni-broker start` and its HTTP interface, streamed.

jct is the mean completion time, ttfp the time to the first packet of audio (of the baseline: to the whole),
rtf the time until the last sample over the length of the audio. A stage's busy share is the processor time of
its engine over the run's time: 1 is one core, all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from pipelines.loader import load
from scripts.benchmarks.common import Report, quantile
from scripts.benchmarks.house import House, house, told
from scripts.benchmarks.voice import SUBJECTS

PACKAGES = ("torch", "transformers")
RATE = 24_000
STAGES = ("encoder", "thinker", "talker", "code2wav")


class Family(NamedTuple):
    """What differs between the two."""

    pipeline: str
    maker: str  #: module with ``Sizes`` and ``make``
    model: str  #: transformers' class
    sizes: dict[str, int]  #: about 100 million parameters in all


FAMILIES = {
    "qwen2_5": Family(
        "qwen2_5_omni",
        "pipelines.convert.qwen2_5_omni_tiny",
        "Qwen2_5OmniForConditionalGeneration",
        {
            "thinker": 640,
            "thinker_layers": 9,
            "talker": 512,
            "talker_layers": 9,
            "heads": 8,
            "kv_heads": 4,
            "codes": 1024,
            "tower": 128,
            "dit": 64,
            "vocoder": 64,
        },
    ),
    "qwen3": Family(
        "qwen3_omni",
        "pipelines.convert.qwen3_omni_tiny",
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "thinker": 512,
            "thinker_layers": 8,
            "talker": 384,
            "talker_layers": 6,
            "heads": 8,
            "kv_heads": 4,
            "expert": 384,
            "predictor_layers": 2,
            "codebooks": 8,
            "codes": 1024,
            "tower": 128,
            "vocoder": 128,
            "decoder": 128,
        },
    ),
}


class Answer(NamedTuple):
    """One answer as its caller saw it, in seconds since all were sent."""

    first_audio: float
    end: float
    audio: float  #: the length of the speech


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench omni",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5")
    parser.add_argument("--requests", type=int, default=16, help="all at once (default 16)")
    parser.add_argument("--tokens", type=int, default=32, help="of each text (default 32)")
    parser.add_argument("--frames", type=int, default=96, help="codes of each speech (default 96)")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="of the random model")
    parser.add_argument("--stage", action="append", default=[], metavar="SETTING", help="as start takes it")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, of both sides")
    options = parser.parse_args(argv)
    report = Report("omni", argv, packages=PACKAGES)
    results = measure(options, report.say)
    report.table("Requests at once", [{k: v for k, v in results.items() if not isinstance(v, dict)}])
    report.table("Busy shares", [results["busy"]])
    report.finish(results)


def measure(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Both sides, one after the other."""
    family = FAMILIES[options.family]
    sizes = family.sizes | {name: int(value) for name, _, value in (s.partition("=") for s in options.size)}
    with tempfile.TemporaryDirectory(prefix="omni-bench-model-") as folder:
        model = Path(folder) / "model"
        maker = importlib.import_module(family.maker)
        maker.make(model, maker.Sizes(**sizes))
        say(f"a model of {sum(f.stat().st_size for f in model.glob('*.safetensors')) / 4e6:.0f} M parameters")
        answers, busy = asyncio.run(served(options, family, model))
        baseline = generated(options, family, model)
    jct, baseline_jct = mean([a.end for a in answers]), mean([a.end for a in baseline])
    return {
        "family": options.family,
        "requests": options.requests,
        "tokens": options.tokens,
        "frames": options.frames,
        "jct_s": jct,
        "baseline_jct_s": baseline_jct,
        "jct_reduction": 1 - jct / baseline_jct,
        "throughput_ratio": max(a.end for a in baseline) / max(a.end for a in answers),
        "ttfp_p50_s": quantile([a.first_audio for a in answers], 0.5),
        "baseline_ttfp_p50_s": quantile([a.first_audio for a in baseline], 0.5),
        "rtf_p50": quantile([a.end / a.audio for a in answers], 0.5),
        "baseline_rtf_p50": quantile([a.end / a.audio for a in baseline], 0.5),
        "busy": busy,
    }


def mean(values: Sequence[float]) -> float:
    """Arithmetic."""
    return sum(values) / len(values)


# --- the served side


async def served(
    options: argparse.Namespace, family: Family, model: Path
) -> tuple[list[Answer], dict[str, float]]:
    """The answers, and how busy each stage was."""
    settings = [f"{stage}.max_num_seqs={max(options.requests, 1)}" for stage in STAGES]
    settings += [f"{stage}.devices={options.device}" for stage in STAGES]
    command = [*told([family.pipeline], [*settings, *options.stage]), "--model", str(model)]
    async with house(command) as home, aiohttp.ClientSession(home.url, read_bufsize=1 << 20) as session:
        numbers = range(options.requests)
        # Other questions, so that afterwards only the system prompt is one that was read before.
        await asyncio.gather(*(ask(session, options, n, "What is") for n in numbers))
        before, began = processor_s(home), time.perf_counter()
        answers = await asyncio.gather(*(ask(session, options, n) for n in numbers))
        seconds = time.perf_counter() - began
        busy = {stage: (s - before[stage]) / seconds for stage, s in processor_s(home).items()}
    return answers, busy


def processor_s(home: House) -> dict[str, float]:
    """Processor seconds of each stage's engines so far."""
    used = dict.fromkeys(STAGES, 0.0)
    for process in home.processes():
        if process.role == "engine":
            stage = process.stage.partition("/")[2]
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            used[stage] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def conversation(family: Family, number: int, opening: str = "Tell me about") -> list[dict[str, str]]:
    """The n-th request's messages."""
    thinker = load(family.pipeline).stages["thinker"]
    system = [{"role": "system", "content": said} for said in [thinker.options.get("system_prompt")] if said]
    return [*system, {"role": "user", "content": f"{opening} {SUBJECTS[number % len(SUBJECTS)]}."}]


async def ask(
    session: aiohttp.ClientSession, options: argparse.Namespace, number: int, opening: str = "Tell me about"
) -> Answer:
    """One streamed answer in text and speech. Raises RuntimeError when it is not whole."""
    family = FAMILIES[options.family]
    exactly = [{"max_tokens": n, "min_tokens": n, "temperature": 0} for n in (options.tokens, options.frames)]
    body = {
        "model": family.pipeline,
        "messages": conversation(family, number, opening),
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "sampling_params_list": [{}, *exactly, {}],
        "seed": number,
        "stream": True,
    }
    start = time.perf_counter()
    first_audio = 0.0
    samples = 0
    async with session.post("/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                if line.startswith(b"{"):
                    raise RuntimeError(f"request {number}: {line[:300]!r}")
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"request {number}: {chunk['error']}")
            for choice in chunk["choices"]:
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    first_audio = first_audio or time.perf_counter() - start
                    samples += len(base64.b64decode(data)) // 2
    if not samples:
        raise RuntimeError(f"request {number}: no audio came")
    return Answer(first_audio, time.perf_counter() - start, samples / RATE)


# --- the baseline


def generated(options: argparse.Namespace, family: Family, folder: Path) -> list[Answer]:
    """The same requests by transformers, one after the other."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, family.model).from_pretrained(folder).to(options.device).eval()

    def answer(number: int) -> float:
        """The length of the speech, seconds."""
        inputs = tokenizer.apply_chat_template(
            conversation(family, number),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(options.device)
        with torch.inference_mode():
            _, wave = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                thinker_max_new_tokens=options.tokens,
                thinker_min_new_tokens=options.tokens,
                thinker_do_sample=False,
                talker_max_new_tokens=options.frames,
                talker_min_new_tokens=options.frames,
                talker_do_sample=False,
                **_ends(model),
            )
        return float(wave.numel() / RATE)

    answer(0)
    began = time.perf_counter()
    answers = []
    for number in range(options.requests):
        audio = answer(number)
        end = time.perf_counter() - began
        answers.append(Answer(end, end, audio))
    return answers


def _ends(model: Any) -> dict[str, Any]:
    """Qwen2.5's ``generate`` takes the real checkpoint's ends of speech for granted."""
    talker = model.config.talker_config
    if not hasattr(talker, "tts_codec_end_token_id"):
        return {}
    return {"talker_eos_token_id": [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]}
