"""Which stage a guardian works for."""

from __future__ import annotations

from broker.core.state import PipelineState, StageState
from broker.protocol import VERSION, Hello


def find_stage(m: Hello, pipelines: dict[str, PipelineState]) -> StageState | str:
    """The stage that a guardian names, or why there is none."""
    if m.version != VERSION:
        return version_mismatch("worker", m.version)
    if not m.pipeline and len(pipelines) > 1:
        return f"name a pipeline with --pipeline; this broker serves: {', '.join(pipelines)}"
    pipeline = pipelines.get(m.pipeline) if m.pipeline else next(iter(pipelines.values()))
    if pipeline is None:
        return f"no pipeline {m.pipeline!r}; this broker serves: {', '.join(pipelines)}"
    for stage in pipeline.stages:
        if stage.name == m.stage:
            return stage
    return f"{pipeline.name} has no stage {m.stage!r}; it has: {', '.join(pipeline.router.order)}"


def version_mismatch(who: str, version: int) -> str:
    """Says that a peer is of another release."""
    return f"this broker speaks protocol version {VERSION}, the {who} {version}; install the same release"
