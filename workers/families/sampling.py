"""Sampling parameters that a checkpoint of several models brings for one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Our names, and those of a generation config.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


def sampling_defaults(
    generation: Mapping[str, Any], stage: str, own: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """What ``generation_config.json`` says of a stage ("talker_temperature", ...), else ``own``.

    ``own`` are the defaults of transformers' ``generate`` for that stage, by the names of a generation
    config, ``do_sample`` included: without that a stage is greedy.
    """
    prefix = f"{stage}_"
    said = {name.removeprefix(prefix): value for name, value in generation.items() if name.startswith(prefix)}
    settings = {**own, **said}
    defaults = {ours: settings[name] for ours, name in _NAMES.items() if settings.get(name) is not None}
    if not settings.get("do_sample"):
        defaults["temperature"] = 0.0
    return defaults
