"""What a worker asks of a node, and the words for a cluster that can't hold it."""

from __future__ import annotations

import pytest

from broker.placement.demand import Demand, demand_of, device_of, trouble
from pipelines.graph import Resources, Stage


def asked(engine: str = "vllm", *, gpus: bool = True, **resources: object) -> tuple[Demand, str]:
    demand = demand_of(Stage(engine, resources=Resources(**resources)), gpus=gpus)  # type: ignore[arg-type]
    return demand, device_of(demand)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (asked(), (Demand(1, 1), "cuda:0")),
        (asked(gpus=False), (Demand(1, 0), "cpu")),
        (asked("vits-decoder"), (Demand(1, 0), "cpu")),
        (asked("my.engines:Mine"), (Demand(1, 0), "cpu")),
        (asked("my.engines:Mine", devices="cuda:3"), (Demand(1, 1), "cuda:0")),
        (asked(devices="cpu", threads=4), (Demand(4, 0), "cpu")),
        (asked(tensor_parallel_size=2), (Demand(1, 2), "cuda:0,cuda:1")),
        (
            asked(devices=["cuda:2", "cuda:3"], tensor_parallel_size=2, gpus=False),
            (Demand(1, 2), "cuda:0,cuda:1"),
        ),
    ],
)
def test_a_stage_asks_for_its_threads_and_ranks(got: object, expected: object) -> None:
    assert got == expected


def test_what_does_not_fit_is_named_with_what_there_is() -> None:
    nodes = [Demand(2, 0), Demand(2, 0), Demand(8, 1)]
    assert trouble(1, Demand(99, 0), nodes) == (
        "1 worker can't be placed: each asks for 99 CPUs, and no node has so much; they have "
        "2 CPUs, 8 CPUs and 1 GPU"
    )
    assert trouble(2, Demand(1, 1), nodes) == (
        "2 workers can't be placed: each asks for 1 CPU and 1 GPU, and no node has so much left"
    )
    assert trouble(1, Demand(1, 0), []).endswith("they have nothing, since there is no node")
