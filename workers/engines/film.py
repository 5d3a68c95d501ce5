"""Engine ``film``: frames to a film as a file.

A stage of its own: the pixels of a film are a hundred times as large as the file, which is kept until its
caller comes for it, and the encoder wants processors, which a gateway has no use for.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.chunk import Payload
from pipelines.graph import Stage
from workers.engine import ItemError, Job

Frames = NDArray[np.uint8]


class FilmEngine:
    """{"frames": uint8 [frames, height, width, 3], "fps": frames a second} in, one after the other; one
    {"mp4": uint8 [bytes]} out.

    What is marked as "partial" is no part of the film.
    """

    resumes = False
    _av: Any

    def __init__(self, stage: Stage, *, device: str) -> None:
        self.stage = stage
        self._slots = asyncio.Semaphore(1)  # the encoder has threads of its own

    async def start(self) -> None:
        """Loads the encoder."""
        import av

        self._av = av

    async def stop(self) -> None:
        """Nothing to let go."""

    async def run(self, job: Job) -> AsyncIterator[Payload]:
        """One job. Raises ItemError for frames that make no film."""
        if job.emitted:
            return
        payloads = [payload for name in job.inputs for payload in await job.gather(name)]
        parts = [payload for payload in payloads if "partial" not in payload]
        frames = [_frames(part) for part in parts]
        if len({part.shape[1:] for part in frames}) != 1:
            raise ItemError("the pipeline gave no film" if not frames else "frames of several sizes")
        fps = parts[0].get("fps")
        if not isinstance(fps, int | float) or not 0 < fps <= 1000:
            raise ItemError(f"fps: {fps!r}, not from 0 to 1000")
        stop = threading.Event()
        async with self._slots:
            try:
                mp4 = await asyncio.to_thread(self._encode, frames, fps, stop)
            finally:
                stop.set()  # a cancelled job's thread ends at its next frame
        yield {"mp4": np.frombuffer(mp4, np.uint8)}

    def _encode(self, parts: Sequence[Frames], fps: float, stop: threading.Event) -> bytes:
        """H.264 in MP4, its index first, so that a player may begin before it has everything."""
        file = io.BytesIO()
        index = str(4096 + 64 * sum(map(len, parts)))  # bytes kept free for it; it takes about half of that
        with self._av.open(file, "w", format="mp4", options={"moov_size": index}) as container:
            rate = Fraction(fps).limit_denominator(1001)
            stream = container.add_stream("libx264", rate=rate, options={"crf": "18", "preset": "veryfast"})
            stream.codec_context.thread_count = self.stage.resources.threads
            height, width = parts[0].shape[1:3]
            # Colour is kept at half the resolution, so edges are even.
            stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
            for part in parts:
                for frame in part:
                    if stop.is_set():
                        return b""
                    even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                    container.mux(stream.encode(self._av.VideoFrame.from_ndarray(even, "rgb24")))
            container.mux(stream.encode(None))
        return file.getvalue()


def _frames(payload: Payload) -> Frames:
    frames = payload.get("frames")
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4:
        raise ItemError("the pipeline gave no frames of 8 bit pixels")
    if frames.shape[-1] != 3 or 0 in frames.shape:
        raise ItemError(f"the pipeline's frames have the shape {frames.shape}")
    return frames
