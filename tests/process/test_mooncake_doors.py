"""`omni-broker start` and `omni-worker` say at once when they are to use a Mooncake that isn't there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from adapters.mooncake_client import Address, adapted
from scripts.ports import free_port
from tests.adapters.moon import ROOT, moon, need
from tests.house import House, line, module, write


def start(*options: str) -> subprocess.CompletedProcess[str]:
    command = module("broker.cli", "start", "--port", "0", *options)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_an_edge_over_mooncake_needs_one(tmp_path: Path) -> None:
    document = line("a", "b")
    document["edges"][1]["transport"] = "mooncake"
    got = start("--pipeline", write(tmp_path, document))
    assert got.returncode == 2
    assert "edges[1].transport: mooncake, but this broker has none" in got.stderr
    assert "from a to b" in got.stderr


def test_a_master_that_does_not_answer_is_named_with_the_cure() -> None:
    need()
    address = f"127.0.0.1:{free_port()}"
    got = start("--pipeline", "echo", "--store", "mooncake", "--mooncake-master", address)
    assert got.returncode == 2
    assert f"no Mooncake master answers at {address} (Connection refused)" in got.stderr
    assert "mooncake_master" in got.stderr


def test_what_start_is_told_reaches_all_who_use_it() -> None:
    with moon(0) as made:
        told = {"metadata": "http://10.0.0.1:8080/metadata", "buffer_mib": 7, "replicas": 3}
        call = f"store_address('mooncake', {made.address!r}, **{told})"
        code = f"from broker.commands.stores import store_address; print({call})"
        command = [sys.executable, "-c", code]
        got = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert Address.parse(got.stdout.strip()) == Address(made.address, **told)  # type: ignore[arg-type]


def test_what_a_worker_is_told_goes_before_that() -> None:
    text = str(Address("10.0.0.1:50051", space="a", buffer_mib=7, replicas=3))
    ours = Address.parse(adapted(text, master="10.9.0.1:50051", buffer_mib=9))
    assert ours == Address("10.9.0.1:50051", space="a", buffer_mib=9, replicas=3)


def test_a_worker_can_adapt_only_what_its_broker_has(echo: House) -> None:
    worker = echo.worker("say", "--mooncake-transfer-buffer-size", "5")
    assert worker.wait(60) == 2
    assert "this broker keeps nothing in Mooncake; start it with --store mooncake" in echo.log
