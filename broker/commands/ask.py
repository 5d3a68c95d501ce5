"""`omni-broker ask`: one question, its answer as it comes, and its speech into a file."""

from __future__ import annotations

import asyncio
import sys
import time
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.commands import files
from broker.commands.common import (
    INTERRUPTED,
    MAX_NUMBER,
    MAX_SEED,
    USAGE,
    Broker,
    Keys,
    choose,
    errors_in_words,
    say,
    show_whatever_comes,
    use_keys,
)

if TYPE_CHECKING:
    from broker.attached import Attached

_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}


def ask(  # noqa: PLR0917 - the options of a command line
    text: Annotated[str, typer.Argument(help="The question.")] = "",
    audio: Annotated[
        Path | None, typer.Option(help="Speak the answer too, into this WAV file.", dir_okay=False)
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture: PNG, JPEG, WebP, ... Repeat it for more.", **_FILE)
    ] = None,
    video: Annotated[
        list[Path] | None, typer.Option(help="A video: MP4, WebM, ... Repeat it for more.", **_FILE)
    ] = None,
    clip: Annotated[
        list[Path] | None,
        typer.Option(
            "--clip", "--file", help="A question by voice: WAV, FLAC, MP3, ... Repeat it for more.", **_FILE
        ),
    ] = None,
    use_audio_in_video: Annotated[
        bool, typer.Option("--use-audio-in-video", help="Let videos' own sound be heard with them.")
    ] = False,
    pipeline: Annotated[str, typer.Option(help="Which one; needed when several are served.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="The answer's length at most.", min=1, max=MAX_NUMBER)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answer.", min=0, max=MAX_SEED)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the likeliest word.", min=0, max=2)
    ] = None,
    broker: Broker = None,
    keys: Keys = None,
) -> None:
    """Ask a running broker, and print the answer as it comes."""
    use_keys(keys)
    show_whatever_comes()
    if not (text or image or video or clip):
        say("nothing to ask: give a TEXT, an --image, a --video or a --clip")
        raise typer.Exit(USAGE)
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    with errors_in_words():
        try:
            attached = asyncio.run(
                files.read(image or [], video or [], clip or [], sound_in_videos=use_audio_in_video)
            )
            asyncio.run(_ask(text, attached, audio, pipeline, sampling, seed, broker))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


async def _ask(  # noqa: PLR0917
    text: str,
    attached: Attached,
    audio: Path | None,
    pipeline: str,
    sampling: dict[str, Any],
    seed: int | None,
    broker: str | None,
) -> None:
    from broker.client import Client
    from broker.exchange import AudioEvent, DoneEvent, TextEvent, chat, exchange

    modalities = ("text", "audio") if audio is not None else ("text",)
    speech = Recorder(audio) if audio is not None else None
    first: dict[str, float] = {}
    try:
        async with Client(broker, kind="cli") as client:
            name = choose([*client.pipelines], pipeline)
            asked = chat(
                client.pipelines[name], text, modalities, attached=attached, sampling=sampling, seed=seed
            )
            begin = time.monotonic()
            async for event in exchange(client, asked):
                elapsed = time.monotonic() - begin
                if isinstance(event, TextEvent):
                    first.setdefault("text", elapsed)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, AudioEvent) and speech is not None:
                    first.setdefault("audio", elapsed)
                    speech.write(event.audio, event.sample_rate)
                elif isinstance(event, DoneEvent):
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    say(summary(first, elapsed, speech))
    finally:
        if speech is not None:
            speech.close()


class Recorder:
    """Writes speech into a WAV file (16 bit, mono) as it comes. Without any, what was there before stays."""

    def __init__(self, path: Path) -> None:
        self.seconds = 0.0
        self.path = path
        self._draft = files.Draft(path)
        self._wave: wave.Wave_write | None = None

    def write(self, samples: Any, rate: int) -> None:
        """More samples: float32, in [-1, 1]."""
        from broker.gateway.audio import to_int16

        with self._draft.writing():
            if self._wave is None:
                self._wave = wave.open(self._draft.file, "wb")  # noqa: SIM115 - closed in close()
                self._wave.setnchannels(1)
                self._wave.setsampwidth(2)
                self._wave.setframerate(rate)
            self._wave.writeframes(to_int16(samples))
        self.seconds += len(samples) / rate

    def close(self) -> None:
        """Sets the sizes in the header: what has come is kept, be it all or not."""
        if self._wave is not None:
            with self._draft.writing():
                self._wave.close()
            self._draft.keep()
        self._draft.drop()


def summary(first: dict[str, float], elapsed: float, speech: Recorder | None) -> str:
    """The times of an answer, in words."""
    parts = []
    if "text" in first:
        parts.append(f"first token after {first['text']:.2f} s")
    if "audio" in first:
        parts.append(f"first audio after {first['audio']:.2f} s")
    parts.append(f"all after {elapsed:.2f} s")
    if speech is not None and speech.seconds:
        factor = elapsed / speech.seconds
        parts.append(f"{speech.seconds:.1f} s of speech in {speech.path} (real-time factor {factor:.2f})")
    return ", ".join(parts)
