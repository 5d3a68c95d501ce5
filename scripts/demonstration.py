"""What scripts/demo does once there is an environment: models, a server of its own, one spoken answer.

The question goes over HTTP, through the official OpenAI client, as anybody would ask it. The answer's text is
printed as it comes, its speech goes into a WAV file, and Whisper writes down what it hears in it.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

from pipelines import models
from pipelines.errors import ModelError
from pipelines.loader import load
from pipelines.progress import Console

QUESTION = "What is the capital of France?"
PIPELINE = "voice"
READY_S = 600.0  #: the workers get so long to load their models
TELL_S = 10.0
WAV_HEADER = 44  #: bytes, as the gateway writes it


class DemoError(Exception):
    """Ends the demo with this message."""


def main() -> int:
    """Runs the demo; returns the exit code."""
    options = parse()
    try:
        pull_models()
        with tempfile.TemporaryDirectory(prefix="omni-demo-") as folder, server(Path(folder)) as (url, log):
            client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
            wait_until_ready(url, log)
            answer(client, options)
            if options.serve:
                serve(url)
        tell("everything is stopped")
    except (DemoError, ModelError, OpenAIError, OSError) as error:
        tell(f"demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="From a fresh clone to a spoken answer."
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--text", default=QUESTION, help=f"the question (default: {QUESTION!r})")
    question.add_argument(
        "--voice", type=Path, help="a question by voice: an audio file (WAV, MP3, FLAC, ...)"
    )
    question.add_argument("--spoken", action="store_true", help="speak the question first, then ask by voice")
    parser.add_argument("--output", type=Path, default=Path("answer.wav"), help="where the speech goes")
    parser.add_argument("--serve", action="store_true", help="leave the server up until Ctrl-C")
    options = parser.parse_args()
    if options.voice is not None and not options.voice.is_file():
        parser.error(f"{options.voice} is no file")
    if not os.access(options.output.parent, os.W_OK):
        parser.error(f"--output {options.output}: {options.output.parent} is no folder that can be written")
    return options


def tell(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def pull_models() -> None:
    """Fetches what the pipeline needs, now rather than on first use, so that it can be seen."""
    progress = Console()
    try:
        for name in sorted({stage.model for stage in load(PIPELINE).stages.values() if stage.model}):
            models.ensure(name, progress)
    finally:
        progress.close()


@contextmanager
def server(folder: Path, pipeline: str = PIPELINE) -> Iterator[tuple[str, Path]]:
    """A server on a free port, with folders of its own; gives its address and its log. Stopped after."""
    command = [sys.executable, "-P", "-m", "broker.cli", "start", "--pipeline", pipeline, "--port", "0"]
    log = folder / "server.log"
    with log.open("wb") as output:
        # It stops when its standard input ends: even if this process is killed, nothing is left running.
        process = subprocess.Popen(
            [*command, "--stop-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMNI_RUN_DIR": str(folder / "run"),
                "OMNI_STATE_DIR": str(folder / "state"),
            },
            start_new_session=True,  # Ctrl-C is for us
        )
    try:
        yield address(process, log), log
    except (DemoError, OpenAIError):
        tell(f"--- the end of the server's log\n{tail(log)}")
        raise
    finally:
        # It closes its input, which stops it. A signal besides would be the second, and wait for nothing.
        process.communicate(timeout=120)


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens: it says so, as soon as it has found a free port."""
    deadline = time.monotonic() + READY_S
    while process.poll() is None:
        if found := re.search(r"listening on (http\S+)\s", log.read_text(errors="replace")):
            return found[1]
        if time.monotonic() > deadline:
            raise DemoError(f"the server has opened no port after {READY_S:.0f} s")
        time.sleep(0.05)
    raise DemoError(f"the server has ended with code {process.returncode}")


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def wait_until_ready(url: str, log: Path) -> None:
    """Until every stage has a worker; says now and then which ones are missing."""
    tell("starting the server; its workers load their models ...")
    began = told = time.monotonic()
    while True:
        ready, state = probe_ready(url)
        now = time.monotonic()
        if ready:
            tell(f"  ready after {now - began:.0f} s: {url}")
            return
        if now - began > READY_S:
            raise DemoError(f"the server waits for {state} after {READY_S:.0f} s")
        if now - told > TELL_S:
            told = now
            tell(f"  {now - began:.0f} s: waiting for {state}")
        time.sleep(0.25)


def probe_ready(url: str) -> tuple[bool, str]:
    """Whether GET /ready is 200, and what is missing."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10):
            return True, ""
    except urllib.error.HTTPError as error:
        missing = json.load(error).get("missing", [])
        return False, ", ".join(missing) or "the broker"
    except (urllib.error.URLError, OSError):
        return False, "the gateway"


def answer(client: OpenAI, options: argparse.Namespace) -> None:
    """Asks, prints the answer as it comes, writes its speech, and has it written down again."""
    content = question(client, options)
    began = time.monotonic()
    stream = client.chat.completions.create(
        model=PIPELINE,
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
        temperature=0,
        max_tokens=120,
        seed=1,
        stream=True,
    )
    first: dict[str, float] = {}
    speech = bytearray()
    for event in stream:
        delta = event.choices[0].delta
        if delta.content:
            first.setdefault("token", time.monotonic() - began)
            print(delta.content, end="", flush=True)
        if delta.audio and delta.audio.data:
            first.setdefault("audio", time.monotonic() - began)
            speech += base64.b64decode(delta.audio.data)
    elapsed = time.monotonic() - began
    print(flush=True)
    if "token" not in first or len(speech) <= WAV_HEADER:
        raise DemoError("the answer holds no text or no speech")
    seconds = write_wav(options.output, bytes(speech))
    with options.output.open("rb") as file:
        heard = client.audio.transcriptions.create(model=PIPELINE, file=file).text
    tell(f"heard in {options.output}: {heard.strip()}")
    tell(
        f"first token after {first['token']:.2f} s, first audio after {first['audio']:.2f} s, all "
        f"{seconds:.1f} s of speech after {elapsed:.2f} s (real-time factor {elapsed / seconds:.2f})"
    )


def question(client: OpenAI, options: argparse.Namespace) -> Any:
    """The content of the user's message: text, or a clip."""
    if options.voice is None and not options.spoken:
        tell(f"asking: {options.text}")
        return options.text
    if options.voice is not None:
        data, kind = options.voice.read_bytes(), options.voice.suffix.lstrip(".").lower() or "wav"
    else:
        tell(f"asking by voice: {options.text}")
        speech = client.audio.speech.create(
            model=PIPELINE, voice="alloy", input=options.text, response_format="wav"
        )
        data, kind = speech.content, "wav"
    clip = {"data": base64.b64encode(data).decode(), "format": kind}
    return [{"type": "input_audio", "input_audio": clip}]


def write_wav(path: Path, streamed: bytes) -> float:
    """Writes a streamed WAV, whose header could not know its length, as one that does. Returns seconds."""
    rate = int.from_bytes(streamed[24:28], "little")
    samples = streamed[WAV_HEADER:]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples)
    return len(samples) / 2 / rate


def serve(url: str) -> None:
    """Until Ctrl-C."""
    tell(f"serving at {url}; Ctrl-C ends it")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        tell("stopping ...")


if __name__ == "__main__":
    sys.exit(main())
