"""Liveness and readiness apart, probes that don't pile up, and a gateway that outlives its broker."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from broker.client import Client
from tests.gateway.stack import Stack, empty, until


@pytest.fixture
def lonely() -> Iterator[Stack]:
    """A gateway by itself; the test starts what else it wants."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        stack = Stack(Path(folder), "--probe-s", "0.5")
        try:
            yield stack
        finally:
            stack.stop()


def test_a_gateway_without_a_broker_is_alive_and_not_ready(lonely: Stack) -> None:
    assert lonely.get("/health")[0] == 200
    status, body = lonely.get("/ready")
    assert status == 503
    assert b"broker" in body
    assert lonely.get("/v1/models")[0] == 503
    assert lonely.get("/metrics")[0] == 200


def test_readiness_follows_the_stages(lonely: Stack) -> None:
    lonely.start_broker()
    until(lambda: b"echo/say" in lonely.get("/ready")[1], "the stages to be missed")
    status, body = lonely.get("/ready")
    assert status == 503
    assert b"echo/sum" not in body, "nobody wants workers of this stage"
    until(lambda: lonely.get("/v1/models")[0] == 200, "the models")
    lonely.start_workers()
    lonely.wait_ready()
    lonely.end("narrow-say")
    until(lambda: b"narrow/say" in lonely.get("/ready")[1], "the stage without a worker to be missed")
    status, body = lonely.get("/ready")
    assert status == 503, body


def test_a_restarted_broker_is_found_again(lonely: Stack) -> None:
    lonely.start_broker()
    until(lambda: lonely.get("/v1/models")[0] == 200, "the broker to be found")
    lonely.end("broker", signal.SIGKILL)
    until(lambda: lonely.get("/ready")[1].find(b"broker") >= 0, "the broker to be missed")
    assert lonely.get("/health")[0] == 200
    assert lonely.get("/status")[0] == 503
    lonely.start_broker()
    until(lambda: b"echo/say" in lonely.get("/ready")[1], "the new broker to be found")


async def test_probes_of_a_frozen_broker_answer_in_bounded_time_and_do_not_pile_up(lonely: Stack) -> None:
    lonely.start_broker()
    until(lambda: lonely.get("/v1/models")[0] == 200, "the broker to be found")
    frozen = lonely.processes["broker"]
    frozen.send_signal(signal.SIGSTOP)
    try:
        async with aiohttp.ClientSession(lonely.url) as session:

            async def probe() -> int:
                async with session.get("/ready") as response:
                    return response.status

            start = time.monotonic()
            assert set(await asyncio.gather(*(probe() for _ in range(100)))) == {503}
            assert time.monotonic() - start < 30, "each by itself they take 50 s"
            async with session.get("/health") as response:
                assert response.status == 200
    finally:
        frozen.send_signal(signal.SIGCONT)
    until(lambda: b"echo/say" in lonely.get("/ready")[1], "the broker's answer")


async def test_metrics_have_names_that_tools_know(
    stack: Stack, http: aiohttp.ClientSession, broker: Client
) -> None:
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": "a b"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
    }
    await empty(broker)
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
    text = ""
    async with asyncio.timeout(60):
        while "omni_stage_workers" not in text:  # the broker may not have answered in time
            async with http.get("/metrics") as response:
                assert response.content_type == "text/plain"
                text = await response.text()
    for name in (
        'omni_num_requests_running{pipeline="echo",stage="say"} 0.0',
        'omni_num_requests_waiting{pipeline="echo",stage="say"} 0.0',
        'omni_stage_workers{pipeline="echo",stage="tone"} 1.0',
        'omni_stage_replicas_wanted{pipeline="echo",stage="tone"} 1.0',
        'omni_stage_replicas_min{pipeline="echo",stage="sum"} 0.0',
        'omni_stage_replicas_max{pipeline="echo",stage="say"} 1.0',
        'omni_time_to_first_token_seconds_count{pipeline="echo"}',
        'omni_time_to_first_audio_seconds_count{pipeline="echo"}',
        'omni_e2e_request_latency_seconds_count{pipeline="echo"}',
        'omni_real_time_factor_count{pipeline="echo"}',
        'omni_stage_service_seconds_bucket{le="+Inf",pipeline="echo",stage="say"}',
        'omni_http_requests_total{endpoint="/v1/chat/completions",status="200"}',
        "omni_arena_bytes",
    ):
        assert name in text, name
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(samples) == len({line.rpartition(" ")[0] for line in samples}), "no sample comes twice"


async def test_status_says_how_many_workers_there_should_be(
    stack: Stack, http: aiohttp.ClientSession, broker: Client
) -> None:
    body: dict[str, Any] = {}
    async with asyncio.timeout(60):
        while "pipelines" not in body:  # the broker may not have answered in time
            async with http.get("/status") as response:
                body = await response.json()
    stages = body["pipelines"]["echo"]["stages"]
    wanted = {name: (stage["replicas"]["wanted"], stage["replicas"]["why"]) for name, stage in stages.items()}
    assert wanted["say"] == (1, "a number in the pipeline")
    assert wanted["sum"] == (0, "0 in the pipeline: only by hand")


def test_a_taken_port_is_said_in_one_line(lonely: Stack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [sys.executable, "-P", "-m", "broker.gateway", "--port", port, "--address", lonely.address],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "--port" in result.stderr


def test_no_model_library_is_loaded(stack: Stack) -> None:
    maps = Path(f"/proc/{stack.processes['gateway'].pid}/maps").read_text()
    assert not [name for name in ("torch", "onnxruntime", "ctranslate2") if name in maps]


def test_an_idle_gateway_rests(stack: Stack) -> None:
    stat = Path(f"/proc/{stack.processes['gateway'].pid}/stat")

    def ticks() -> int:
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def rests() -> bool:
        before = ticks()
        time.sleep(2.0)  # the measured time itself, not a wait for something
        return ticks() - before <= 4

    until(rests, "2 s with 2 % of a core")  # the tests before may have left something to clean up
