"""Parts of a checkpoint in diffusers' layout: a stage loads its own and no others.

Such a checkpoint is a folder with ``model_index.json``, which names each part's library and class, and a
folder of that name for each part.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from pipelines import models

#: Libraries that ``model_index.json`` may name; its classes are imported from them.
_LIBRARIES = ("diffusers", "transformers")


class Parts:
    """A checkpoint's parts.

    Args:
        model: A folder, a model of the catalogue (pulled if need be) or a Hugging Face id, of which only what
            is asked for is downloaded.
        device: Where modules shall be.
        dtype: The option: "auto" is float32 on a CPU and bfloat16 elsewhere.

    Raises what :func:`pipelines.models.ensure` raises, and ValueError for what is no such checkpoint.
    """

    def __init__(self, model: str, *, device: str, dtype: str = "auto") -> None:
        import torch

        folder = models.ensure(model)
        self._source = str(folder) if folder.is_dir() else model
        self.device = torch.device(device)
        if dtype == "auto":
            dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        self.dtype: Any = getattr(torch, dtype)
        self.index: dict[str, Any] = json.loads(self._file("model_index.json").read_text("utf-8"))

    def has(self, name: str) -> bool:
        """Whether there is such a part."""
        entry = self.index.get(name)
        return isinstance(entry, list) and len(entry) == 2 and all(entry)

    def module(self, name: str, kind: Any = None) -> Any:
        """A part with weights, ready for inference.

        Args:
            name: Of the part: "transformer", "vae", "text_encoder", ...
            kind: Its class, where the one that the checkpoint names is not wanted.

        Raises ValueError for a checkpoint without such a part, or with one that lacks weights.
        """
        kind = kind or self._class(name)
        module, info = kind.from_pretrained(
            self._source,
            subfolder=name,
            dtype=self.dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        # The libraries would go on with random weights in these places, and only warn.
        if missing := sorted(info["missing_keys"]):
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"{self._source}: {name} has no {', '.join(missing[:3])}{more}")
        return module.to(self.device).requires_grad_(False).eval()

    def plain(self, name: str, kind: Any = None) -> Any:
        """A part without weights: a tokenizer, scheduler or processor. Raises as :meth:`module` does."""
        return (kind or self._class(name)).from_pretrained(self._source, subfolder=name)

    def config(self, name: str, file: str | None = None) -> dict[str, Any]:
        """A part's ``config.json`` (a scheduler's ``scheduler_config.json``, or the file that is named),
        without loading the part."""
        file = file or ("scheduler_config.json" if name == "scheduler" else "config.json")
        config: dict[str, Any] = json.loads(self._file(f"{name}/{file}").read_text("utf-8"))
        return config

    def folder(self, name: str) -> Path:
        """Where a part's files are, all of them, for loaders of another kind."""
        source = Path(self._source)
        if not source.is_dir():
            from huggingface_hub import snapshot_download

            source = Path(snapshot_download(self._source, allow_patterns=[f"{name}/*"]))
        if not (source / name).is_dir():
            raise ValueError(f"{self._source} holds no checkpoint in diffusers' layout: there is no {name}")
        return source / name

    def _class(self, name: str) -> Any:
        if not self.has(name):
            raise ValueError(f"{self._source}: model_index.json names no {name}")
        module, kind = self.index[name]
        if module not in _LIBRARIES:
            raise ValueError(f"{self._source}: {name} is of {module!r}; known are {', '.join(_LIBRARIES)}")
        return getattr(importlib.import_module(module), kind)

    def _file(self, name: str) -> Path:
        if Path(self._source).is_dir():
            file = Path(self._source) / name
        else:
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(self._source, name))
        if not file.is_file():
            raise ValueError(f"{self._source} holds no checkpoint in diffusers' layout: there is no {name}")
        return file
