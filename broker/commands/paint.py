"""`omni-broker paint`: words, and perhaps pictures, to a picture in a file."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from broker.commands import files
from broker.commands.common import (
    FAILED,
    INTERRUPTED,
    MAX_SEED,
    USAGE,
    Broker,
    Keys,
    choose,
    errors_in_words,
    say,
    use_keys,
)

if TYPE_CHECKING:
    from adapters.chunk import Payload
    from broker.client import Client, RequestStream
    from broker.exchange import Question
    from broker.gateway.picture_schemas import ImagesRequest
    from broker.gateway.pictures import Rgb

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
QUALITY = 95  #: of JPEG and WebP
LOOK_S = 0.3  #: between two looks at how far it is


def paint(  # noqa: PLR0917 - the options of a command line
    text: Annotated[str, typer.Argument(help="What to paint.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file: .png, .jpg or .webp.", dir_okay=False)
    ] = Path("picture.png"),
    image: Annotated[
        list[Path] | None,
        typer.Option(help="A picture to change. Repeat it for more.", exists=True, dir_okay=False),
    ] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same picture.", min=0, max=MAX_SEED)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="More take longer.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How closely to follow the words.")] = None,
    negative: Annotated[str | None, typer.Option(help="What it should not show.")] = None,
    pipeline: Annotated[
        str, typer.Option("--pipeline", "--model", help="Which one; needed when several paint.")
    ] = "",
    broker: Broker = None,
    keys: Keys = None,
) -> None:
    """Have a running broker paint a picture, into a file."""
    from broker.gateway.errors import ApiError
    from broker.gateway.picture_schemas import ImagesRequest

    use_keys(keys)
    if output.suffix.lower() not in FORMATS:
        say(f"{output}: name a file that ends with {', '.join(FORMATS)}")
        raise typer.Exit(USAGE)
    asked = ImagesRequest(
        prompt=text,
        size=size,
        seed=seed,
        num_inference_steps=steps,
        guidance_scale=guidance,
        negative_prompt=negative,
    )
    with errors_in_words():
        try:
            given = asyncio.run(files.read(image or [], [], [], sound_in_videos=False)).images
            asyncio.run(_paint(asked, [*given], output, pipeline, broker))
        except ApiError as error:
            say(error.message)
            raise typer.Exit(USAGE if error.status == 400 else FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


async def _paint(
    asked: ImagesRequest, given: list[Rgb], path: Path, pipeline: str, broker: str | None
) -> None:
    from broker.client import Client
    from broker.exchange import submit
    from broker.gateway import prints

    draft = files.Draft(path)
    try:
        async with Client(broker, kind="cli") as client:
            question = _question(client, asked, given, pipeline)
            begin = time.monotonic()
            async with await submit(client, question) as stream:
                picture = prints.pixels(await _last(client, stream))
                encoded = prints.encode(picture, FORMATS[path.suffix.lower()], QUALITY)
        with draft.writing():
            draft.file.write(encoded)
        draft.keep()
    finally:
        draft.drop()
    elapsed = time.monotonic() - begin
    took = ", ".join(f"{t.stage} {t.ended - t.started:.2f} s" for t in stream.timings)
    height, width = picture.shape[:2]
    say(f"{path}: {width} x {height} pixels, seed {question.seed}, in {elapsed:.2f} s ({took})")


def _question(client: Client, asked: ImagesRequest, given: list[Rgb], wanted: str) -> Question:
    """What is asked of whom, within the bounds that the HTTP endpoint has too."""
    from broker.exchange import picture
    from broker.gateway import drawing, picture_schemas

    what = "edits" if given else "images"
    able = [name for name, pipeline in client.pipelines.items() if what in pipeline.endpoints]
    pipeline = client.pipelines[choose(able, wanted, f"pipeline with {what}")]
    picture_schemas.refuse_unsupported(asked)
    params = drawing.pictures(asked, pipeline.endpoints[what], 1)
    return picture(
        pipeline,
        asked.prompt,
        negative_prompt=asked.negative_prompt,
        images=given,
        params=params,
        seed=asked.seed,
    )


async def _last(client: Client, stream: RequestStream) -> Payload:
    """The picture, when it is finished; says meanwhile how far it is."""
    line = Line()
    telling = asyncio.create_task(_tell(client, stream.name, line))
    try:
        last: Payload = {}
        async for _, payload in stream:
            last = payload
        return last
    finally:
        telling.cancel()
        line.clear()


async def _tell(client: Client, name: str, line: Line) -> None:
    from broker.client import BrokerError

    while True:
        await asyncio.sleep(LOOK_S)
        with suppress(BrokerError):  # it may be restarted meanwhile; the picture comes all the same
            report = await client.inspect("request", name)
            if "error_status" not in report:
                line.show(standing(report))


def standing(report: dict[str, Any]) -> str:
    """Where a request is, in words: the stages that work for it, and how much each of them has done."""
    from broker.protocol import Timing

    timings = msgspec.convert(report["stages"], list[Timing])
    working = [timing.stage for timing in timings if timing.started >= 0 and timing.ended < 0]
    if not working:
        return "waiting"
    return ", ".join(f"{stage} {report['progress'][stage]:.0%}" for stage in working)


class Line:
    """One line on the terminal that is written over and over; in a log, a line for each change."""

    def __init__(self) -> None:
        self._rewrite = sys.stderr.isatty()
        self._text = ""

    def show(self, text: str) -> None:
        """What it says now."""
        if text == self._text:
            return
        self._text = text
        sys.stderr.write(f"\r{text}\x1b[K" if self._rewrite else f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Leaves the terminal's line to others."""
        if self._rewrite and self._text:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
