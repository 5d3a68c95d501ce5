"""Trains `painter`: an autoencoder, then a denoiser; writes their weights and what they are worth.

Every part is kept in the work folder each minute, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from pipelines.cache import cache_dir
from pipelines.telemetry import no_telemetry
from scripts.painter.settings import ROOT, WEIGHTS, Settings


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts/train_painter", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=cache_dir() / "painter-training", help="the work folder"
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where the weights go")
    parser.add_argument("--evaluate", action="store_true", help="only judge the weights that are there")
    parser.add_argument("--peek", action="store_true", help="judge an unfinished denoiser; writes no weights")
    parser.add_argument("--only", choices=("autoencoder", "states"), help="only this part")
    parser.add_argument("--prompts", type=int, default=300, help="held-out prompts to judge by (300)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another setting")
    options = parser.parse_args()
    settings = _settings(options.set, options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    no_telemetry()

    import diffusers
    import torch
    import transformers

    from scripts.painter import autoencoder, denoiser, export, states
    from scripts.painter.evaluation import evaluate, grid
    from scripts.painter.painting import Plain

    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    began, weights = time.process_time(), options.weights
    if not options.evaluate:
        vae = autoencoder.train(settings, options.folder)
        if options.only == "autoencoder":
            return 0
        told = states.told(settings, options.folder)
        if options.only == "states":
            return 0
        if options.peek:
            weights = options.folder / "peek"
            kept = torch.load(options.folder / "denoiser.pt", weights_only=True)
            print(f"denoiser: step {kept['step']}", file=sys.stderr)
            transformer = denoiser.finished(settings, told, kept["average"])
        else:
            transformer = denoiser.train(settings, options.folder, told, vae)
        export.export(weights, settings, transformer, vae)
    painter = Plain.load(weights, settings.language_model, settings.layers, settings.max_tokens)
    figures, prompts, pictures = evaluate(painter, options.prompts)
    figures["cpu_s"] = round(time.process_time() - began)
    print(json.dumps(figures))
    grid(pictures[:24], 6, 2, options.folder / "grid.png")
    if weights == WEIGHTS and options.prompts >= 300:
        export.write_json(weights / "figures.json", figures)
        grid(pictures[:24], 6, 2, ROOT / "docs" / "painter.png")
        export.write_json(options.folder / "prompts.json", [prompt.text for prompt in prompts[:24]])
    return 0


def _settings(changes: list[str], threads: int) -> Settings:
    import msgspec

    values = dict(change.split("=", 1) for change in changes)
    return msgspec.convert(values | {"threads": threads}, Settings, strict=False)


if __name__ == "__main__":
    sys.exit(main())
