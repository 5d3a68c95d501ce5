"""What Prometheus reads: the broker's figures and what only the gateway sees. Names follow vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RATIOS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)
_PIPELINE = ("pipeline",)
_STAGE = ("pipeline", "stage")


class Metrics:
    """The gateway's own figures, by pipeline."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a second series nobody asks for
        self.registry = CollectorRegistry()
        self.first_text = Histogram(
            "omni_time_to_first_token_seconds",
            "From a request's arrival to its first text.",
            _PIPELINE,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.first_audio = Histogram(
            "omni_time_to_first_audio_seconds",
            "From a request's arrival to its first audio.",
            _PIPELINE,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.first_image = Histogram(
            "omni_time_to_first_image_seconds",
            "From a request's arrival to its first picture, partial or not.",
            _PIPELINE,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.latency = Histogram(
            "omni_e2e_request_latency_seconds",
            "From a request's arrival to its answer's end.",
            _PIPELINE,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.real_time_factor = Histogram(
            "omni_real_time_factor",
            "Seconds that a request took per second of speech it gave.",
            _PIPELINE,
            registry=self.registry,
            buckets=_RATIOS,
        )
        self.answers = Counter(
            "omni_http_requests",
            "HTTP requests by endpoint and the status they ended with, or 'disconnected'.",
            ("endpoint", "status"),
            registry=self.registry,
        )

    def watch(self, pipeline: str, started: float) -> Watch:
        """Times a request that has come in at ``started`` (:func:`time.perf_counter`)."""
        return Watch(self, pipeline, started)

    def text(self, report: dict[str, Any]) -> bytes:
        """Everything in Prometheus' text format; ``report`` is the broker's "metrics" report, or empty."""
        return generate_latest(self.registry) + (generate_latest(_Broker(report)) if report else b"")


class Watch:
    """Times one request."""

    __slots__ = ("_audio", "_image", "_metrics", "_pipeline", "_started", "_text")

    def __init__(self, metrics: Metrics, pipeline: str, started: float) -> None:
        self._metrics = metrics
        self._pipeline = pipeline
        self._started = started
        self._text = self._audio = self._image = False

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def first_text(self) -> None:
        """There is text; only the first call counts."""
        if not self._text:
            self._text = True
            self._metrics.first_text.labels(self._pipeline).observe(self._elapsed())

    def first_audio(self) -> None:
        """There is audio; only the first call counts."""
        if not self._audio:
            self._audio = True
            self._metrics.first_audio.labels(self._pipeline).observe(self._elapsed())

    def first_image(self) -> None:
        """There is a picture; only the first call counts."""
        if not self._image:
            self._image = True
            self._metrics.first_image.labels(self._pipeline).observe(self._elapsed())

    def done(self, audio_s: float = 0.0) -> None:
        """The answer is complete."""
        elapsed = self._elapsed()
        self._metrics.latency.labels(self._pipeline).observe(elapsed)
        if audio_s:
            self._metrics.real_time_factor.labels(self._pipeline).observe(elapsed / audio_s)


class Unwatched(Watch):
    """For an answer that is fetched later, or again: its times tell nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def first_text(self) -> None:
        """See :class:`Watch`."""

    def first_audio(self) -> None:
        """See :class:`Watch`."""

    def first_image(self) -> None:
        """See :class:`Watch`."""

    def done(self, audio_s: float = 0.0) -> None:
        """See :class:`Watch`."""


class _Broker(Collector):
    """The broker's report (see broker.core.report) as metric families."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        report = self._report
        yield self._stage_gauge("omni_num_requests_running", "Tasks that workers hold.", "running")
        yield self._stage_gauge("omni_num_requests_waiting", "Tasks that wait for a worker.", "queued")
        yield self._stage_gauge("omni_stage_workers", "Workers that are ready.", "workers")
        yield self._stage_gauge(
            "omni_stage_replicas_wanted", "Workers that there should be.", "replicas_wanted"
        )
        yield self._stage_gauge("omni_stage_replicas_min", "Workers that there are at least.", "replicas_min")
        yield self._stage_gauge("omni_stage_replicas_max", "Workers that there are at most.", "replicas_max")
        yield self._stage_histogram("omni_stage_queue_wait_seconds", "From queued to assigned.", "wait")
        yield self._stage_histogram("omni_stage_service_seconds", "From assigned to ended.", "service")
        tasks = CounterMetricFamily(
            "omni_stage_tasks", "Tasks, attempts and deaths.", labels=(*_STAGE, "event")
        )
        chunks = CounterMetricFamily("omni_stage_chunks", "Chunks of output.", labels=_STAGE)
        for stage in report["stages"]:
            chunks.add_metric(_labels(stage), stage["chunks"])
            for event, count in stage["tasks"].items():
                tasks.add_metric([*_labels(stage), event], count)
        yield tasks
        yield chunks
        requests = CounterMetricFamily(
            "omni_requests", "Requests by how they ended.", labels=("pipeline", "status")
        )
        for pipeline, status, count in report["requests"]:
            requests.add_metric([pipeline, status], count)
        yield requests
        unfinished = GaugeMetricFamily(
            "omni_requests_unfinished", "Accepted and not ended.", labels=_PIPELINE
        )
        for pipeline, count in report["unfinished"]:
            unfinished.add_metric([pipeline], count)
        yield unfinished
        refused = CounterMetricFamily("omni_refused", "Messages dropped, by reason.", labels=("reason",))
        for reason, count in report["refused"].items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily(
            "omni_arena_bytes",
            "Bytes of tensors in shared memory that somebody needs.",
            report["block_bytes"],
        )

    def _stage_gauge(self, name: str, text: str, field: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_STAGE)
        for stage in self._report["stages"]:
            family.add_metric(_labels(stage), stage[field])
        return family

    def _stage_histogram(self, name: str, text: str, field: str) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_STAGE)
        bounds = [*map(str, self._report["buckets_s"]), "+Inf"]
        for stage in self._report["stages"]:
            total, buckets = 0, []
            for bound, count in zip(bounds, stage[field]["counts"], strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(_labels(stage), buckets, stage[field]["sum"])
        return family


def _labels(stage: dict[str, Any]) -> list[str]:
    return [stage["pipeline"], stage["stage"]]
