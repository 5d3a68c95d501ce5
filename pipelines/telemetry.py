"""Libraries that report to their makers are asked not to."""

from __future__ import annotations

import os

#: Some of these libraries report to their makers by default. A user who wants that sets the variable.
TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def no_telemetry() -> None:
    """Asks libraries that are imported later to report nothing."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
