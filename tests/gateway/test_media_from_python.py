"""Pictures, clips and videos of `omni-broker ask` and of the Python API: the stages get what was given.

As in :mod:`tests.gateway.test_media_in_chats`, a checksum says whether every byte is right.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from broker import Omni
from broker.cli import app
from broker.gateway import films, media
from broker.gateway.uploads import Pixels
from tests.gateway.stack import Stack
from tests.gateway.test_films import film
from tests.gateway.test_media_in_chats import BOUNDS, digest, noise
from tests.gateway.test_pictures import png
from tests.gateway.test_uploads import file, tone


def ask(stack: Stack, *arguments: str) -> Result:
    """`omni-broker ask`, in this process: starting one would take longer than all that it does."""
    return CliRunner().invoke(app, ["ask", "--broker", stack.address, *arguments])


@pytest.fixture(autouse=True)
def _in_the_stacks_memory(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_SHM_DIR", str(stack.shm))


def asked(content: Any, **fields: Any) -> str:
    return digest({"messages": [{"role": "user", "content": content}], **fields})


def test_ask_takes_several_files_of_each_kind(stack: Stack, tmp_path: Path) -> None:
    pictures = [noise(90, 80, 1), noise(70, 60, 2)]
    moving, sound = film(20, kind="webm", sound=tone(1.0, 48_000)), asyncio.run(file("flac", 0.5))
    paths = {name: str(tmp_path / name) for name in ("a.png", "b.png", "c.webm", "d.flac")}
    for path, data in zip(paths.values(), (*map(png, pictures), moving, sound), strict=True):
        Path(path).write_bytes(data)
    seen = asyncio.run(films.decode(moving, "film", BOUNDS, pixels=Pixels(1), sound_s=5))
    samples = asyncio.run(media.decode(sound, "clip", max_s=1))
    content: list[dict[str, Any]] = [
        {"type": "text", "text": "what?"},
        {"type": "image", "index": 0},
        {"type": "image", "index": 1},
        {"type": "video", "index": 0},
        {"type": "audio", "index": 0},
    ]
    fields: dict[str, Any] = {"images": pictures, "videos": [seen.frames], "video_fps": [seen.fps]}
    options = ["--pipeline", "senses", "--image", paths["a.png"], "--image", paths["b.png"]]
    options += ["--video", paths["c.webm"], "--file", paths["d.flac"]]
    got = ask(stack, "what?", *options)
    assert (got.exit_code, got.stdout) == (0, asked(content, audio=[samples], **fields) + "\n"), got.stderr
    content[3]["audio"] = 1
    got = ask(stack, "what?", *options, "--use-audio-in-video")
    assert got.stdout == asked(content, audio=[samples, seen.sound], **fields) + "\n"


def test_ask_says_in_one_line_which_file_is_wrong(stack: Stack, tmp_path: Path) -> None:
    picture, noise_ = tmp_path / "a.png", tmp_path / "noise"
    picture.write_bytes(png(noise(5, 5, 1)))
    noise_.write_bytes(b"neither seen nor heard")
    senses = ["--pipeline", "senses"]
    for arguments, says in (
        ([*senses, "--image", str(noise_)], f"--image {noise_}: not a picture; accepted are PNG"),
        ([*senses, "--video", str(noise_)], f"--video {noise_}: not a video; accepted are mp4"),
        ([*senses, "--clip", str(noise_)], f"--clip {noise_}: not an audio file"),
        (["--pipeline", "echo", "--image", str(picture)], "echo takes no images"),
    ):
        got = ask(stack, *arguments)
        assert (got.exit_code, got.stdout) == (2, "")
        assert says in got.stderr
        assert len(got.stderr.splitlines()) == 1


def test_the_python_api_takes_arrays(stack: Stack) -> None:
    picture, frames, samples = noise(90, 80, 1), np.stack([noise(9, 8, i) for i in range(4)]), tone(0.5)
    with Omni("senses", address=stack.address) as omni:
        got = omni.generate("what?", images=[picture], videos=[(frames, 2.0)], audio=[samples])
        content = [
            {"type": "text", "text": "what?"},
            {"type": "image", "index": 0},
            {"type": "video", "index": 0},
            {"type": "audio", "index": 0},
        ]
        fields = {"images": [picture], "videos": [frames], "video_fps": [2.0], "audio": [samples]}
        assert got.text == asked(content, **fields)
        content = [{"type": "image", "index": 0}, {"type": "text", "text": "what?"}]
        got = omni.generate([{"role": "user", "content": content}], images=[picture])
        assert got.text == asked(content, images=[picture])
        for wrong in (picture.astype(np.float32), picture[0], picture[:, :, :2], picture[:0]):
            with pytest.raises(ValueError, match=r"uint8 \[height, width, 3\]"):
                omni.generate("x", images=[wrong])
        with pytest.raises(ValueError, match=r"uint8 \[frames"):
            omni.generate("x", videos=[(picture, 2.0)])
        with pytest.raises(ValueError, match="above 0"):
            omni.generate("x", videos=[(frames, 0.0)])
        with pytest.raises(ValueError, match="no user message"):
            omni.generate([{"role": "system", "content": "x"}], images=[picture])
    with Omni("echo", address=stack.address) as omni, pytest.raises(ValueError, match="takes no images"):
        omni.generate("x", images=[picture])


def test_a_picture_from_python_shows_the_last_words(stack: Stack) -> None:
    with Omni("sketch", address=stack.address) as omni:

        def drawn(prompt: Any) -> Any:
            (payload,) = omni.generate(prompt, ["image"], seed=1).outputs["image"]
            return payload["image"][0, 0].tolist()

        asked = [{"role": "user", "content": [{"type": "text", "text": "a boat"}]}]
        assert drawn("a boat") == drawn(asked) != drawn("a ship")
        with pytest.raises(ValueError, match="what to draw"):
            drawn([{"role": "system", "content": "a boat"}])
