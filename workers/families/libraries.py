"""What an engine that runs a family's modules does before it loads them."""

from __future__ import annotations

import os

from pipelines import models
from pipelines.graph import Stage
from workers.engines.vllm_setup import cpu_threads
from workers.optional import library


def load_libraries(stage: Stage, threads: int = 0) -> None:
    """Imports torch and transformers, with so many threads for one operation; 0: the stage's number.

    Raises :class:`workers.optional.MissingLibrary` naming the extra of omni-broker that brings them.
    """
    # Waiting threads that spin take the cores from the other stages of the pipeline.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if models.ensure(stage.model or "").is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    library("torch", "cpu").set_num_threads(threads or stage.resources.threads or cpu_threads())
    # Of configurations it says what their authors should know, on every start.
    library("transformers", "cpu").logging.set_verbosity_error()


def load_diffusers(stage: Stage, threads: int = 0) -> None:
    """The same, and diffusers. Raises as :func:`load_libraries` does."""
    load_libraries(stage, threads)
    for name in ("diffusers", "transformers"):
        logging = library(name, "pictures").utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
