"""Sizes: short ones for every test run, the whole ones with OMNI_SOAK=1 (about half an hour)."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size", int, float)

SOAK = os.environ.get("OMNI_SOAK") == "1"


def size(short: Size, whole: Size) -> Size:
    """What this run asks for."""
    return whole if SOAK else short
