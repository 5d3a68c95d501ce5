"""A stage's own share of a checkpoint: its modules are built alone, and only their tensors are read.

A checkpoint of a whole omni model may be a hundred gigabytes, of which a stage needs a part. So a stage
builds transformers' module for its part (not the model around it), without initialising it, and fills it from
the safetensors files of the folder, tensor by tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines import models

#: A mixture of experts is stored expert by expert, and computed with the experts of a layer in one tensor:
#: [experts, 2 x intermediate, hidden] with the gate's rows before the up projection's, and [experts, hidden,
#: intermediate].
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


#: What is downloaded of a hub's repository. Of pickles only the speakers, which are read as tensors alone.
_FILES = ["*.json", "*.jinja", "*.txt", "*.safetensors", "spk_dict.pt"]


class Checkpoint:
    """A checkpoint folder with ``config.json`` and safetensors files.

    Args:
        model: A folder, a model of the catalogue (pulled if need be) or a Hugging Face id (downloaded if need
            be). Raises what :func:`pipelines.models.ensure` raises, and ValueError for a folder without
            weights.
    """

    def __init__(self, model: str) -> None:
        folder = models.ensure(model)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model, allow_patterns=_FILES))
        self.folder = folder
        self._files = _files(folder)

    @cached_property
    def config(self) -> Any:
        """transformers' configuration of the whole model."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """What ``generation_config.json`` says, as it is; {} where there is none."""
        return read_json(self.folder / "generation_config.json")

    def has(self, prefix: str) -> bool:
        """Whether it holds tensors of that part."""
        return any(name.startswith(prefix) for name in self._files)

    def dtype(self, wish: str, device: str) -> Any:
        """The torch dtype of an option: "auto" is float32 on a CPU and the checkpoint's own elsewhere."""
        import torch

        if wish == "auto":
            own = getattr(self.config, "dtype", None) or torch.bfloat16
            return torch.float32 if device == "cpu" else own
        return getattr(torch, wish)

    def part(self, build: Callable[[], Any], prefix: str, *, device: str, dtype: Any) -> Any:
        """A module for inference with the tensors whose names begin with ``prefix``.

        Args:
            build: Makes the module; called with new tensors on the device and no initialisation.
            prefix: Of the module's names in the checkpoint, with its last dot.
            device: Where the module shall be.
            dtype: Of its parameters.

        Raises ValueError naming tensors that are missing or don't fit.
        """
        import torch
        from transformers.initialization import no_init_weights

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), no_init_weights():
                module = build()
        finally:
            torch.set_default_dtype(before)
        module.requires_grad_(False)
        module.eval()
        self._fill(module, prefix)
        return module

    def rows(self, name: str, numbers: Sequence[int]) -> Any:
        """Some rows of a matrix, [len(numbers), ...], without reading the rest of it. Raises ValueError."""
        import torch
        from safetensors import safe_open

        if name not in self._files:
            raise ValueError(f"{self.folder}: the checkpoint has no {name}")
        with safe_open(self.folder / self._files[name], framework="pt") as tensors:
            matrix = tensors.get_slice(name)
            return torch.stack([matrix[number] for number in numbers])

    def _fill(self, module: Any, prefix: str) -> None:
        import torch

        places = dict(module.named_parameters()) | _persistent_buffers(module)
        missing = {name: place.numel() for name, place in places.items()}
        with torch.no_grad():
            for name, tensor in self._tensors(prefix):
                found = _place(places, name)
                if found is None:
                    continue  # of another version of the module, say
                key, place = found
                if place.shape != tensor.shape:
                    raise ValueError(
                        f"{self.folder}: {prefix}{name} is {list(tensor.shape)}, expected {list(place.shape)}"
                    )
                place.copy_(tensor)
                missing[key] -= place.numel()
        lacking = sorted(prefix + name for name, elements in missing.items() if elements > 0)
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ValueError(f"{self.folder}: the checkpoint has no {', '.join(lacking[:3])}{more}")

    def _tensors(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """(name after the prefix, tensor) file by file."""
        from safetensors import safe_open

        names = [name for name in self._files if name.startswith(prefix)]
        for file in sorted({self._files[name] for name in names}):
            with safe_open(self.folder / file, framework="pt") as tensors:
                for name in names:
                    if self._files[name] == file:
                        yield name.removeprefix(prefix), tensors.get_tensor(name)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file's object; {} if there is no such file."""
    if not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def _files(folder: Path) -> dict[str, str]:
    """Tensor's name -> file in the folder. Raises ValueError."""
    index = read_json(folder / "model.safetensors.index.json")
    if index:
        files: dict[str, str] = index["weight_map"]
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"{folder} holds no checkpoint: neither model.safetensors nor an index of several")
    from safetensors import safe_open

    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single.name)


def _persistent_buffers(module: Any) -> dict[str, Any]:
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def _place(places: Mapping[str, Any], name: str) -> tuple[str, Any] | None:
    """Which tensor of the module a tensor of the checkpoint goes into, or into which part of it."""
    if name in places:
        return name, places[name]
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return None
    layer, number, kind = expert[1], int(expert[2]), expert[3]
    key = f"{layer}.down_proj" if kind == "down" else f"{layer}.gate_up_proj"
    if key not in places or number >= len(places[key]):
        return None
    rows = places[key][number]
    if kind == "down":
        return key, rows
    half = len(rows) // 2
    return key, rows[:half] if kind == "gate" else rows[half:]
