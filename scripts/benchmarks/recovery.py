"""What callers under steady load lose while processes are killed and stopped at random, and how they go on.

Every request is one of a small set with fixed seeds, which ran undisturbed before; each answer must equal
that one: bit for bit for `echo`, and for `voice` in its text and within one 16-bit step of its waveform.
Callers whose connection is gone come back with Last-Event-ID, as a browser's EventSource does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop

from scripts.benchmarks.callers import Answer, Caller, Lost, Resumed
from scripts.benchmarks.common import Report, quantile
from scripts.benchmarks.deaths import KINDS, Deaths, Happened
from scripts.benchmarks.house import House, Leaks, house, told
from scripts.benchmarks.voice import question

PROMPTS = 8  #: distinct requests of a pipeline
LIMIT_S = {
    "echo": 10.0,
    "voice": 120.0,
}  #: of one attempt (`echo` takes 3 s); it is what finds a stopped engine
STAGES = {"echo": ("say", "tone"), "voice": ("thinker", "talker", "code2wav")}
WATCH_S = 0.5
EMPTY_S = 60.0  #: after the last answer the broker's tables are empty within this time,
KEPT_S = 330.0  #: or, where a request was made whose caller never heard its name, when that is kept no longer


def body(pipeline: str, number: int) -> dict[str, Any]:
    """The n-th request of a pipeline. Every second one is stored, so that its caller may leave."""
    text = " ".join(f"w{number}-{word}" for word in range(10 + 4 * number))
    own: dict[str, dict[str, Any]] = {
        "echo": {"sampling_params_list": [{"chunk_sleep_s": 0.08}, None, None, None]},
        "voice": {"temperature": 0, "max_tokens": 48, "ignore_eos": True},
    }
    return {
        "model": pipeline,
        "messages": [{"role": "user", "content": text if pipeline == "echo" else question(number)}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "seed": number,
        "stream": True,
        "store": number % 2 == 0,
        **own[pipeline],
    }


class Outcome(NamedTuple):
    """How one request ended."""

    pipeline: str
    number: int
    answer: Answer | None  #: None: it was lost
    why: str
    caller: Caller


# --- how much was done twice


class Work:
    """What all stages have done over all lives of the broker, and how much of it was lost.

    Counted in chunks: an attempt that breaks off loses the one that it was making, at most. Counted in
    seconds, the time after an attempt's last chunk, in which a hung or stopped engine did nothing at all.
    """

    NAMES = ("chunks", "lost_chunks", "busy_s", "lost_s")

    def __init__(self, home: House) -> None:
        self._home = home
        self._lives: list[list[float]] = [[0.0] * len(self.NAMES)]

    async def note(self) -> None:
        """Asks the broker."""
        status = await self._home.status()
        if status is None:
            return
        stages = [stage for p in status["pipelines"].values() for stage in p["stages"].values()]
        life = [sum(stage["work"][name] for stage in stages) for name in self.NAMES]
        if life[0] < self._lives[-1][0]:  # it counts anew since it was started again
            self._lives.append(life)
        else:
            self._lives[-1] = life

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.note()
            await asyncio.sleep(WATCH_S)

    def shares(self) -> dict[str, float]:
        """Work that had to be done again over all work, in chunks and in seconds."""
        chunks, lost, busy_s, lost_s = (sum(life[i] for life in self._lives) for i in range(4))
        return {
            "recomputed_share": lost / max(chunks + lost, 1),
            "lost_time_share": lost_s / max(busy_s, 1e-9),
        }


# --- the load


class Load:
    """So many callers of each pipeline at once, each asking again as soon as it has its answer.

    Args:
        url: The gateway.
        session: For all connections.
        pipelines: Their names.
        request: Gives the body of a pipeline's n-th request, the same each time.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        pipelines: Sequence[str],
        request: Callable[[str, int], dict[str, Any]] = body,
    ) -> None:
        self.pipelines = pipelines
        self.references: dict[tuple[str, int], Answer] = {}
        self.outcomes: list[Outcome] = []
        self.flips_undisturbed = 0  #: texts that a fuller batch alone changes
        self._url = url
        self._session = session
        self._request = request
        self._open: list[Caller] = []
        self._over = asyncio.Event()

    @property
    def callers(self) -> list[Caller]:
        """Those that wait for an answer now."""
        return self._open

    def due(self, caller: Caller, output: str) -> bool:
        """Whether a caller still waits for some of an output; "": for anything."""
        whole = self.references[caller.body["model"], caller.body["seed"]]
        text, audio = caller.got
        missing = {"text": text < len(whole.text), "audio": audio < len(whole.audio)}
        return missing.get(output, any(missing.values()))

    async def undisturbed(self) -> None:
        """Takes the references, one request at a time; then all at once, to see what batches change."""
        keys = [(name, number) for name in self.pipelines for number in range(PROMPTS)]
        for key in keys:
            self.references[key] = await self._alone(key)
        answers = await asyncio.gather(*(self._alone(key) for key in keys))
        self.flips_undisturbed = sum(
            answer.text != self.references[key].text for key, answer in zip(keys, answers, strict=True)
        )

    async def _alone(self, key: tuple[str, int]) -> Answer:
        caller = Caller(self._session, self._url, self._request(*key))
        answer = await caller.run()
        await caller.forget()
        return answer

    async def run(self, at_once: int) -> None:
        """Until :meth:`finish`, and the last answers."""
        async with asyncio.TaskGroup() as group:
            for name in self.pipelines:
                numbers = itertools.cycle(range(PROMPTS))
                for _ in range(at_once):
                    group.create_task(self._ask(name, numbers))

    def finish(self) -> None:
        """No new requests."""
        self._over.set()

    async def _ask(self, pipeline: str, numbers: itertools.cycle[int]) -> None:
        while not self._over.is_set():
            number = next(numbers)
            caller = Caller(self._session, self._url, self._request(pipeline, number))
            self._open.append(caller)
            try:
                outcome = Outcome(pipeline, number, await caller.run(), "", caller)
            except Lost as error:
                outcome = Outcome(pipeline, number, None, str(error), caller)
            self._open.remove(caller)
            self.outcomes.append(outcome)
            await caller.forget()


# --- the verdict


def difference(outcome: Outcome, whole: Answer) -> str:
    """How it differs from the undisturbed one: "", "flip" (a greedy text took another turn), or in words."""
    answer = outcome.answer
    if answer is None or answer == whole:
        return ""
    if answer.text != whole.text:
        words, expected = answer.text.split(" "), whole.text.split(" ")
        pairs = zip(words, expected, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if outcome.pipeline == "voice" and same:
            return "flip"
        return f"text from word {same} on: {' '.join(words[same : same + 3])!r}"
    got, expected_samples = (
        np.frombuffer(audio, np.int16).astype(int) for audio in (answer.audio, whole.audio)
    )
    if len(got) != len(expected_samples):
        return f"{len(got)} samples for {len(expected_samples)}"
    most = int(np.abs(got - expected_samples).max())
    if outcome.pipeline == "voice" and most <= 1:
        return ""
    return f"samples differ by up to {most}"


def kinds_table(happened: Sequence[Happened], resumed: Sequence[Resumed]) -> list[dict[str, Any]]:
    """One row a kind of death."""
    rows = []
    for kind in KINDS:
        of_kind = [each for each in happened if each.death.kind == kind]
        seconds = [each.seconds for each in resumed if each.kind == kind]
        if of_kind:
            rows.append(
                {
                    "death": kind,
                    "times": len(of_kind),
                    "processes": sum(each.victims for each in of_kind),
                    "streams touched": sum(each.touched for each in of_kind),
                    "resumed p50 s": quantile(seconds, 0.5) if seconds else "-",
                    "longest s": max(seconds) if seconds else "-",
                }
            )
    return rows


def times(resumed: Sequence[Resumed]) -> dict[str, float | None]:
    """p50 and p99 of the seconds until streams went on."""
    seconds = [each.seconds for each in resumed]
    names = {"resume_p50_s": 0.5, "resume_p99_s": 0.99}
    return {name: quantile(seconds, q) if seconds else None for name, q in names.items()}


def verdict(load: Load, happened: Sequence[Happened]) -> dict[str, Any]:
    """All figures that the callers saw."""
    found = [(o, difference(o, load.references[o.pipeline, o.number])) for o in load.outcomes]
    unequal = [(o, text) for o, text in found if text not in ("", "flip")]
    callers = [outcome.caller for outcome in load.outcomes]
    resumed = [each for caller in callers for each in caller.resumed]
    return {
        "requests": len(load.outcomes),
        "kills": len(happened),
        "lost": sum(outcome.answer is None for outcome in load.outcomes),
        "duplicated_chunks": sum(caller.duplicated for caller in callers),
        "gaps": sum(caller.gaps for caller in callers),
        "unequal": len(unequal),
        "text_flips": sum(text == "flip" for _, text in found),
        "text_flips_undisturbed": load.flips_undisturbed,
        **times(resumed),
        "resume_by_pipeline": {
            name: times([each for each in resumed if each.pipeline == name]) for name in load.pipelines
        },
        "comebacks": sum(caller.comebacks for caller in callers),
        "posted_again": sum(caller.posted - 1 for caller in callers),
        "why_lost": dict(Counter(outcome.why for outcome in load.outcomes if outcome.answer is None)),
        "why_unequal": [f"{o.pipeline} {o.number}: {text}" for o, text in unequal][:20],
        "deaths": kinds_table(happened, resumed),
    }


# --- the run


async def disturbed(home: House, load: Load, options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """The load and all the deaths; figures but for what the end leaves."""
    work = Work(home)
    limit = max(LIMIT_S[name] for name in load.pipelines)
    deaths = Deaths(home, lambda: load.callers, load.due, work.note, hung_s=limit, seed=options.seed)
    running = asyncio.create_task(load.run(options.streams))
    watching = asyncio.create_task(work.watch())
    happened: list[Happened] = []
    try:
        for number, kind in enumerate(deaths.deck(options.kinds, options.kills), 1):
            await asyncio.sleep(deaths.pause(options.seconds_between))
            happened.append(await deaths.strike(kind))
            touched = happened[-1].touched
            report.say(f"{number:>4} {kind}: {happened[-1].victims} processes, {touched} streams touched")
        await deaths.settle()
        load.finish()
        await running
        await work.note()
    finally:
        watching.cancel()
        running.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
    unnamed = any(outcome.caller.posted > 1 for outcome in load.outcomes)
    tables = await home.tables(KEPT_S if unnamed else EMPTY_S)
    return {
        **verdict(load, happened),
        **work.shares(),
        "hung_not_found": deaths.not_found,
        "orphaned_segments": await home.orphans(EMPTY_S),
        "left_in_tables": tables,
        "tracebacks": home.log.count("Traceback (most recent call last)"),
    }


async def measure(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Everything, from the start of a house to its end."""
    names = ["echo", "voice"] if options.pipeline == "both" else [options.pipeline]
    limits = [f"{name}/{stage}.timeout_s={LIMIT_S[name]:g}" for name in names for stage in STAGES[name]]
    start = [*told(names, limits), "--checkpoint", options.checkpoint]
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        house(start) as home,
        aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session,
    ):
        load = Load(home.url, session, names)
        report.say("taking the undisturbed answers ...")
        await load.undisturbed()
        began = time.monotonic()
        results = await disturbed(home, load, options, report)
        seconds = time.monotonic() - began
        leaks: Leaks = await home.stop()
        if options.log:
            options.log.write(home.log)
    return {
        **results,
        "seconds": seconds,
        "leaked_segments": leaks.segments,
        "leaked_processes": leaks.processes,
        "leaked_files": leaks.files,
    }


async def _main(report: Report, options: argparse.Namespace) -> None:
    results = await measure(options, report)
    report.table("Deaths", results["deaths"])
    simple = {key: value for key, value in results.items() if not isinstance(value, dict | list)}
    report.table("Outcome", [{"figure": key, "value": value} for key, value in simple.items()])
    for key in ("why_lost", "why_unequal", "left_in_tables"):
        if results[key]:
            report.say(f"{key}: {results[key]}")
    report.finish(results)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench recovery", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="deaths in all")
    parser.add_argument("--pipeline", choices=("echo", "voice", "both"), default="echo")
    parser.add_argument("--seconds-between", type=float, default=3.0, help="mean pause between two deaths")
    parser.add_argument("--streams", type=int, default=8, help="requests of each pipeline at once")
    parser.add_argument("--checkpoint", choices=("none", "memory", "disk"), default="disk")
    parser.add_argument("--kinds", type=_kinds, default=list(KINDS), help=f"any of: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=argparse.FileType("w"), help="a file for what all processes said")
    return parser.parse_args(argv)


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {', '.join(KINDS)}")
    return kinds


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    uvloop.run(_main(Report("recovery", argv, ["aiohttp"]), parse(argv)))
