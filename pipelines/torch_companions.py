"""Finds torchvision, torchaudio and torchcodec builds that do not fit the installed torch.

pip may pair a CPU build of torch with companions that were built for another one. transformers and vLLM
(in a process of its own, so hiding them here would not do) import them if they are there, and die of it
("operator torchvision::nms does not exist"), yet work well without them for text. The set-up removes what
``python -m pipelines.torch_companions`` lists, one name a line.
"""

from __future__ import annotations

import importlib

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


class BrokenEnvironment(RuntimeError):
    """Installed packages that don't fit together; the message says how to mend it."""


def broken() -> list[str]:
    """The companions that are installed and can't be imported."""
    names = []
    for name in COMPANIONS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception:  # whatever a library that doesn't match its torch may raise
            names.append(name)
    return names


def check() -> None:
    """Raises BrokenEnvironment if transformers or vLLM would stumble over a companion of torch."""
    if names := broken():
        raise BrokenEnvironment(
            f"{', '.join(names)} do not fit the installed torch; run: pip uninstall {' '.join(names)}"
        )


if __name__ == "__main__":
    print("\n".join(broken()))
