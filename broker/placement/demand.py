"""What one worker of a stage asks of a node, and what there is to say where no node has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipelines.graph import Stage
from pipelines.options import ENGINES


class Demand(NamedTuple):
    """CPUs and GPUs. Of a node: what it has."""

    cpus: float
    gpus: float

    def fits(self, node: Demand) -> bool:
        """Whether a node with nothing else on it could hold this."""
        return self.cpus <= node.cpus and self.gpus <= node.gpus

    def __str__(self) -> str:
        cpus = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        return f"{cpus} and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else cpus


def demand_of(stage: Stage, *, gpus: bool) -> Demand:
    """One worker's: its threads (one where it names none), and a GPU for each rank if it runs on any.

    Args:
        stage: The stage.
        gpus: Whether any node has a GPU, for `devices: auto`.
    """
    resources = stage.resources
    listed = [resources.devices] if isinstance(resources.devices, str) else resources.devices
    if listed == ["auto"]:
        on_gpu = gpus and stage.engine in ENGINES and ENGINES[stage.engine].gpu
    else:
        on_gpu = any(device.startswith("cuda") for device in listed)
    return Demand(resources.threads or 1, resources.tensor_parallel_size if on_gpu else 0)


def device_of(demand: Demand) -> str:
    """What `omni-worker --device` is told on a node that shows a worker its own GPUs alone."""
    return ",".join(f"cuda:{i}" for i in range(int(demand.gpus))) if demand.gpus else "cpu"


def trouble(waiting: int, demand: Demand, nodes: Iterable[Demand]) -> str:
    """Why workers wait for a node."""
    nodes = list(nodes)
    who = f"{waiting} worker{'s' * (waiting != 1)} can't be placed: each asks for {demand}"
    if any(demand.fits(node) for node in nodes):
        return f"{who}, and no node has so much left"
    there = ", ".join(sorted({str(node) for node in nodes})) or "nothing, since there is no node"
    return f"{who}, and no node has so much; they have {there}"
