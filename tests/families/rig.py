"""The four stages as engines in this process, joined by the pipeline's own edges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapters.chunk import Payload
from adapters.window import windows
from pipelines.graph import Stage, Window
from pipelines.qwen3_omni.transfers import spoken
from tests.engines.helpers import stage, started, stream
from tests.families.qwen3_omni.reference import FILM_PIXELS
from workers.engine import Engine, Job, Stream
from workers.engines.ar.engine import ArEngine
from workers.engines.omni_code2wav import OmniCode2WavEngine
from workers.engines.omni_encoder import OmniEncoderEngine
from workers.inputs import Transfer

FAMILY = "workers.families.qwen3_omni"
GREEDY = {"temperature": 0.0}


def stages(checkpoint: Path, family: str = FAMILY, **settings: Any) -> dict[str, Stage]:
    """The pipeline's stages on a checkpoint; ``settings`` are further options of thinker and talker."""
    ar = {"kv_cache_gib": 0.05, "block_size": 16, **settings}
    model = {"model": str(checkpoint), "resources": {"threads": 1}}
    low, high = FILM_PIXELS
    return {
        "encoder": stage(
            "omni-encoder",
            options={
                "family": f"{family}.encoder:Encoder",
                "video_min_pixels": low,
                "video_max_pixels": high,
            },
            **model,
        ),
        "thinker": stage("ar", options={"family": f"{family}.thinker:Thinker", **ar}, **model),
        "talker": stage("ar", options={"family": f"{family}.talker:Talker", **ar}, **model),
        "code2wav": stage("omni-code2wav", options={"family": f"{family}.code2wav:Decoder"}, **model),
    }


@dataclass
class Answer:
    """One answer, as it came."""

    text: list[Payload] = field(default_factory=list)
    frames: list[Payload] = field(default_factory=list)
    sound: list[Payload] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Of the text."""
        return [token for payload in self.text for token in payload["token_ids"]]

    @property
    def codes(self) -> np.ndarray[Any, Any]:
        """[codebooks, frames]"""
        return np.array([frame for payload in self.frames for frame in payload["codes"]]).T

    @property
    def wave(self) -> np.ndarray[Any, Any]:
        """[samples]"""
        return np.concatenate([payload["audio"] for payload in self.sound])


class Rig:
    """Started engines."""

    def __init__(self, engines: dict[str, Engine], transfer: Transfer = spoken) -> None:
        self.engines = engines
        self._transfer = transfer

    async def answer(
        self,
        request: Payload,
        *,
        text: int = 12,
        frames: int = 16,
        window: Window | None = None,
        **params: Any,
    ) -> Answer:
        """Runs a request through all stages at once, each fed by the one before as that goes on."""
        answer = Answer()
        encoded = await self.encoded(request)
        thinker = self.think(request, encoded, max_tokens=text, **params)
        written = Stream()
        writing = asyncio.create_task(_fed(_noted(thinker, answer.text), written))
        heard = self._transfer(written)
        talker = self.talk(heard, max_tokens=frames + 1, **params)
        cut = windows(_noted(talker, answer.frames), window or Window(frames=25, first=5, left=25))
        async for payload in self._run("code2wav", {"talker": cut}, {}):
            answer.sound.append(payload)
        await writing  # may go on when nothing more is said
        return answer

    async def encoded(self, request: Payload) -> list[Payload]:
        """What the encoder makes of a request's media."""
        if not {"audio", "images", "videos"} & set(request):
            return []
        return [payload async for payload in self._run("encoder", {"request": stream([request])}, {})]

    def think(self, request: Payload, encoded: list[Payload], **params: Any) -> AsyncIterator[Payload]:
        """The thinker's payloads."""
        inputs = {"request": stream([request]), "encoder": stream(encoded)}
        return self._run("thinker", inputs, params, consumers=frozenset({"talker"}))

    def talk(self, heard: AsyncIterator[Payload], **params: Any) -> AsyncIterator[Payload]:
        """The talker's payloads, from those of the edge to it."""
        return self._run("talker", {"thinker": heard}, params)

    def _run(
        self, name: str, inputs: dict[str, Any], params: dict[str, Any], **more: Any
    ) -> AsyncIterator[Payload]:
        return self.engines[name].run(Job(f"test/{name}/1", inputs, {**GREEDY, **params}, 1, **more))


async def _noted(payloads: AsyncIterator[Payload], into: list[Payload]) -> AsyncIterator[Payload]:
    async for payload in payloads:
        into.append(payload)
        yield payload


async def _fed(payloads: AsyncIterator[Payload], into: Stream) -> None:
    try:
        async for payload in payloads:
            into.feed([payload], closed=False)
    except Exception as error:
        into.fail(error)
        raise
    into.feed([], closed=True)


@asynccontextmanager
async def running(
    checkpoint: Path,
    *names: str,
    family: str = FAMILY,
    transfer: Transfer = spoken,
    device: str = "cpu",
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A rig of all stages, or of some."""
    engines: dict[str, Any] = {
        "encoder": OmniEncoderEngine,
        "thinker": ArEngine,
        "talker": ArEngine,
        "code2wav": OmniCode2WavEngine,
    }
    made = stages(checkpoint, family, **settings)
    async with AsyncExitStack() as stack:
        yield Rig(
            {
                name: await stack.enter_async_context(started(engines[name](made[name], device=device)))
                for name in names or engines
            },
            transfer,
        )
