"""`omni-broker paint`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from broker.client import BrokerGone, Client, RequestStream
from broker.commands import paint
from broker.commands.paint import standing
from tests.house import House


def painted(echo: House, file: Path, *options: str) -> str:
    """Paints into a file; returns the last line of what was said."""
    result = echo.command("paint", "a red boat", "-o", str(file), *options)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    return result.stderr.splitlines()[-1]


def test_a_picture_is_the_one_that_was_asked_for(echo: House, tmp_path: Path) -> None:
    first, again, other = tmp_path / "first.png", tmp_path / "again.jpg", tmp_path / "other.webp"
    options = ("--size", "32x16", "--steps", "4", "--guidance", "2.5", "--negative", "blue")
    said = painted(echo, first, *options, "--seed", "7")
    assert said.startswith(f"omni-broker: {first}: 32 x 16 pixels, seed 7, in ")
    assert "picture " in said
    painted(echo, again, *options, "--seed", "7", "--model", "echo")
    painted(echo, other, "--image", str(first), "--seed", "7")
    pictures = [np.asarray(Image.open(file).convert("RGB")).astype(int) for file in (first, again, other)]
    assert {picture.shape for picture in pictures} == {(16, 32, 3)}
    assert np.abs(pictures[0] - pictures[1]).max() < 4  # JPEG
    assert np.abs(pictures[0] - pictures[2]).max() > 4  # it was changed
    assert [Image.open(file).format for file in (first, again, other)] == ["PNG", "JPEG", "WEBP"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.jpg", "first.png", "other.webp"]


def test_it_says_in_one_line_what_is_wrong(echo: House, tmp_path: Path) -> None:
    kept = tmp_path / "kept.png"
    kept.write_bytes(b"mine")
    noise = tmp_path / "noise.png"
    noise.write_bytes(b"no picture")
    for arguments, says, code in (
        (["boat", "-o", str(tmp_path / "boat.gif")], "ends with .png", 2),
        ([" ", "-o", str(kept)], "prompt must hold some text", 2),
        (["boat", "-o", str(kept), "--steps", "0"], "num_inference_steps: 0; from 1 to 200", 2),
        (["boat", "-o", str(kept), "--size", "9000x8"], "width and height are from 1 to 4096", 2),
        (["boat", "-o", str(kept), "--pipeline", "voice"], "name one with --pipeline: echo", 2),
        (["boat", "-o", str(kept), "--image", str(noise)], "not a picture", 2),
        (["boat", "-o", str(tmp_path / "no" / "boat.png")], "No such file", 1),
    ):
        result = echo.command("paint", *arguments)
        assert (result.returncode, result.stdout) == (code, ""), result.stderr
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert kept.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept.png", "noise.png"]


@pytest.mark.parametrize(
    ("started", "says"),
    [([-1, -1], "waiting"), ([0.1, -1], "text 0%"), ([0.1, 0.2], "text 0%, denoiser 40%")],
)
def test_progress_names_the_stages_that_work(started: list[float], says: str) -> None:
    stages = [["text", 0.0, started[0], -1, -1, -1, 0, 1], ["denoiser", 0.0, started[1], -1, -1, -1, 0, 1]]
    assert standing({"stages": stages, "progress": {"text": 0.0, "denoiser": 0.4}}) == says


async def test_a_broker_that_is_away_for_a_while_costs_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paint, "LOOK_S", 0.0)
    answers = iter([BrokerGone("the broker does not answer")] * 2)
    shown = asyncio.Event()

    class Half:
        async def inspect(self, what: str, name: str) -> dict[str, Any]:
            for error in answers:
                raise error
            shown.set()
            return {"stages": [["vae", 0.0, 0.1, -1, -1, -1, 0, 1]], "progress": {"vae": 0.5}}

    class Slow:
        name = "some"

        async def __aiter__(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
            async with asyncio.timeout(30):
                await shown.wait()
            await asyncio.sleep(0.01)
            yield "image", {"image": 1}

    half, slow = cast("Client", Half()), cast("RequestStream", Slow())
    assert await paint._last(half, slow) == {"image": 1}
    assert "vae 50%" in capsys.readouterr().err
