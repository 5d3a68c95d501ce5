"""Which devices this machine has, found without loading torch."""

from __future__ import annotations

import os
from pathlib import Path


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES if set, else the device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
