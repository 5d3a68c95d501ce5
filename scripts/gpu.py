"""``scripts/gpu_check``: what only a GPU can show, with torch alone.

``omni``: the answers of both Qwen-Omni families' stages are compared with transformers', in float32 and
without TF32, with and without captured graphs: text and codes must be equal, the waveform within a tolerance.
Then the benchmarks ``omni`` and ``ar`` run on the device. ``images``: the same of pictures and films, against
diffusers; see scripts/gpu_images.py.

What fails is printed and makes the exit code 1; nothing is left out without a word.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.telemetry import no_telemetry
from scripts import gpu_images

TEXT, FRAMES = 12, 32


class Family(NamedTuple):
    """Where a family's parts are."""

    name: str
    maker: str
    reference: str
    package: str
    transfer: str


FAMILIES = (
    Family(
        "qwen2_5",
        "pipelines.convert.qwen2_5_omni_tiny",
        "tests.families.qwen2_5_omni.reference",
        "workers.families.qwen2_5_omni",
        "pipelines.qwen2_5_omni.transfers:replies",
    ),
    Family(
        "qwen3",
        "pipelines.convert.qwen3_omni_tiny",
        "tests.families.qwen3_omni.reference",
        "workers.families.qwen3_omni",
        "pipelines.qwen3_omni.transfers:spoken",
    ),
)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["omni", "images"])
    parser.add_argument("--device", default="cuda", help="cuda (default); cpu only to try the script itself")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="of waveforms and latents (default 1e-4)"
    )
    parser.add_argument("--equality-only", action="store_true", help="no benchmarks")
    parser.add_argument(
        "--bench",
        action="append",
        default=[],
        metavar="ARGUMENT",
        help="of the benchmark images, like --random",
    )
    options = parser.parse_args(argv)
    no_telemetry()
    import torch
    import transformers

    print(
        f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    if options.device.startswith("cuda"):
        if not torch.cuda.is_available():
            print("FAILED: torch sees no CUDA device", file=sys.stderr)
            return 1
        print(torch.cuda.get_device_name())
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    failures: list[str] = []
    for what, action in _checks(options):
        _attempt(what, action, failures)
    if options.equality_only:
        print("the benchmarks were not run (--equality-only)")
    else:
        _benches(options, failures)
    print("\n".join(["", *(f"FAILED: {failure}" for failure in failures)]) if failures else "\nall good")
    return 1 if failures else 0


def _checks(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    if options.what == "images":
        import torch

        yield from gpu_images.checks(options, torch.cuda.device_count())
        return
    for family in FAMILIES:
        for eager in (False, True):
            what = f"{family.name}, {'eager' if eager else 'captured'}"
            yield what, lambda f=family, e=eager: _compare(f, e, options)  # type: ignore[misc]


def _attempt(what: str, action: Callable[[], list[str]], failures: list[str]) -> None:
    try:
        failures += [f"{what}: {failure}" for failure in action()]
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{what}: {type(error).__name__}: {error}")


def _compare(family: Family, eager: bool, options: argparse.Namespace) -> list[str]:
    """What is not equal. Prints a line for each kind of request."""
    requests = importlib.import_module("tests.families.requests").REQUESTS
    failures = []
    with tempfile.TemporaryDirectory(prefix="omni-gpu-") as name:
        folder = Path(name) / "model"
        importlib.import_module(family.maker).convert(folder, folder)
        reference = importlib.import_module(family.reference).Reference(folder, options.device)
        answers = asyncio.run(_answers(family, folder, eager, options.device, list(requests.values())))
        for (kind, request), answer in zip(requests.items(), answers, strict=True):
            told = _told(family, reference, request)
            codes = np.asarray(told.codes).reshape(answer.codes.shape[0], -1)
            equal = {
                "text": answer.tokens == list(told[0]),
                "codes": answer.codes.shape == codes.shape and bool((answer.codes == codes).all()),
            }
            same = answer.wave.shape == told.wave.shape
            apart = float(np.abs(answer.wave - told.wave).max()) if same else float("inf")
            equal["waveform"] = apart <= options.tolerance
            how = "eager" if eager else "captured"
            print(f"{family.name} {how} {kind}: {equal}, waveform apart by {apart:.2g}", flush=True)
            failures += [f"{kind}: {part} differs" for part, holds in equal.items() if not holds]
    return failures


def _told(family: Family, reference: Any, request: Any) -> Any:
    if family.name == "qwen2_5":
        return reference.answer(request, TEXT, FRAMES + 1)
    return reference.answer(request, text=TEXT, frames=FRAMES)


async def _answers(family: Family, folder: Path, eager: bool, device: str, requests: list[Any]) -> list[Any]:
    """All at once, so that batches form; each decoded as one window."""
    from pipelines.graph import Window
    from workers.inputs import find_transfer

    rigs = importlib.import_module("tests.families.rig")
    async with rigs.running(
        folder,
        family=family.package,
        transfer=find_transfer(family.transfer),
        device=device,
        enforce_eager=eager,
        dtype="float32",
    ) as rig:
        window = Window(frames=10_000)
        return await asyncio.gather(
            *(rig.answer(request, text=TEXT, frames=FRAMES, window=window) for request in requests)
        )


def _benches(options: argparse.Namespace, failures: list[str]) -> None:
    device = options.device
    commands = [gpu_images.bench(options)]
    omni = [
        ["omni", "--family", "qwen2_5", "--device", device],
        ["omni", "--family", "qwen3", "--device", device],
        ["ar", "--engines", "ar", "transformers", "--device", device],
    ]
    for command in omni if options.what == "omni" else commands:
        print(f"\nscripts/bench {' '.join(command)}", flush=True)
        run = subprocess.run(
            [sys.executable, "-P", "-m", "scripts.benchmarks", *command], env=os.environ, check=False
        )
        if run.returncode:
            failures.append(f"bench {' '.join(command)}: exit code {run.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
