"""Requests with all kinds of media, as the gateway sends them."""

from __future__ import annotations

from typing import Any

import numpy as np

from adapters.chunk import Payload


def clip(seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Noise, 16 kHz."""
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * 16000)).astype(np.float32)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Noise, uint8 [H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def film(frames: int, height: int = 64, width: int = 96, seed: int = 0) -> np.ndarray[Any, Any]:
    """Noise, uint8 [T, H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def text(words: str) -> Payload:
    return {"type": "text", "text": words}


def user(*parts: Payload | str) -> Payload:
    content = [text(part) if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def part(kind: str, index: int = 0, **more: Any) -> Payload:
    return {"type": kind, "index": index, **more}


#: Name -> request. Each kind of input alone, and together.
REQUESTS: dict[str, Payload] = {
    "text": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": "Well."},
            {"role": "user", "content": "And now?"},
        ]
    },
    "image": {
        "messages": [user("Look: ", part("image"), " what is it?")],
        "images": [picture(70, 100)],
    },
    "audio": {"messages": [user(part("audio"), "What was that?")], "audio": [clip(2.31)]},
    "video": {
        "messages": [user(part("video"), "What happens?")],
        "videos": [film(6)],
        "video_fps": [1.5],
    },
    "audio in video": {
        "messages": [user(part("video", audio=0), "What happens?")],
        "videos": [film(6)],
        "video_fps": [2.0],
        "audio": [clip(3.2)],
    },
    "mixed": {
        "messages": [
            user(part("image"), "One. ", part("audio"), "Two. ", part("image", 1)),
            {"role": "assistant", "content": "I see."},
            user(part("video"), part("audio", 1), "And that?"),
        ],
        "images": [picture(40, 64), picture(128, 90, 1)],
        "audio": [clip(1.2), clip(3.4, 1)],
        "videos": [film(4)],
        "video_fps": [2.0],
    },
    "mixed with sound in video": {
        "messages": [user(part("image"), part("audio"), part("video", audio=1), "Well?")],
        "images": [picture(64, 64)],
        "audio": [clip(1.5), clip(1.4, 1)],
        "videos": [film(4)],
        "video_fps": [2.0],
    },
}
