"""`omni-broker start` and `stop`: quick to answer, alone in its folder, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.house import House, line, module, write

Houses = Callable[..., House]

BIG = np.zeros(2**20, np.float32)  # travels in shared memory


#: slow to import
HEAVY = ("av", "diffusers", "PIL", "scipy", "torch", "transformers", "vllm")
FRONT = ("broker.cli", "broker.supervisor", "broker.server", "broker.gateway.__main__")


@pytest.mark.parametrize("module", FRONT)
def test_what_starts_first_imports_nothing_heavy(module: str) -> None:
    """`scripts/bench start` says how soon /health answers; this is what it hangs on."""
    code = f"import {module}, sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split()
    assert module in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_health_answers_before_any_model_is_there(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--no-workers", ready=False)
    home.until(lambda: home.get("/health")[0] == 200)
    assert home.get("/ready")[0] == 503


def test_ready_waits_for_a_worker_in_every_stage(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a", "b")), "--no-workers", ready=False)
    home.until(lambda: home.get("/ready")[0] == 503)
    home.worker("a")
    home.until(lambda: home.status()["missing"] == ["line/b"])
    home.until(lambda: misses(home, b"line/b"))
    home.worker("b")
    home.until(home.is_ready)


def misses(home: House, stage: bytes) -> bool:
    """Whether the gateway has asked the broker, and names this stage."""
    status, body = home.get("/ready")
    return status == 503 and stage in body


def test_the_broker_and_the_gateway_are_idle_and_hold_no_torch(echo: House) -> None:
    pids = [echo.process_of("broker.server"), echo.process_of("broker.gateway")]
    for pid in pids:
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert any(idle_share(pids) < 0.02 for _ in range(3))


def idle_share(pids: list[int], seconds: float = 5.0) -> float:
    """The processors' share that processes use while nothing is to do."""
    before = sum(map(cpu_s, pids))
    time.sleep(seconds)  # it is the time that is measured over, nothing is waited for
    return (sum(map(cpu_s, pids)) - before) / seconds


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_second_start_in_the_same_folder_is_refused(echo: House) -> None:
    assert echo.process is not None
    second = echo.command("start", "--pipeline", "echo", "--port", "0")
    assert second.returncode == 2
    assert f"process {echo.process.pid}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    echo.until(echo.is_ready)


def test_stop_waits_for_the_end_and_says_when_there_is_nothing(house: Houses) -> None:
    home = house("--pipeline", "echo")
    stop = home.command("stop")
    assert stop.returncode == 0
    assert stop.stderr.endswith("omni-broker: stopped\n")
    assert home.process is not None
    assert home.process.wait(60) == 0
    again = home.command("stop")
    assert again.returncode == 1
    assert "no broker runs here" in again.stderr


async def test_a_killed_supervisor_leaves_no_process_and_the_next_start_sweeps(
    house: Houses, tmp_path: Path
) -> None:
    pipeline = write(tmp_path, line("a"))
    home = house("--pipeline", pipeline)
    async with home.client() as client:
        given = {"request": [{"tensor": BIG}]}
        hang = {"a": {"hang": True}}
        async with await client.submit("line", outputs=["text"], given=given, params=hang):
            await asyncio.to_thread(home.until, lambda: home.stage("line", "a")["running"] == 1)
            ours = set(home.shm_dir.iterdir())
            home.kill()
            home.until(lambda: not home.processes())
    left = set(home.shm_dir.iterdir())
    assert left, "this test needs something to sweep"
    home.start("--pipeline", pipeline)
    home.until(lambda: not any((home.status()["tables"] | home.status()["kept"]).values()))
    home.until(lambda: not {p for p in ours | left if p.name[-1].isdigit()} & set(home.shm_dir.iterdir()))


def test_a_killed_broker_and_a_killed_gateway_are_started_again(echo: House) -> None:
    for name in ("broker.gateway", "broker.server"):
        before = echo.process_of(name)
        os.kill(before, signal.SIGKILL)

        def replaced(name: str = name, before: int = before) -> bool:
            return [p for p, c in echo.processes().items() if name in c.split() and p != before] != []

        echo.until(replaced)
        echo.until(echo.is_ready)
    assert echo.command("ask", "still there").stdout == "still there\n"


def test_a_log_that_nobody_takes_ends_nothing(house: Houses, tmp_path: Path) -> None:
    """`omni-broker start 2>&1 | head`, or a full disk below the log: what dies is still started again."""
    home = house()
    command = module(
        "broker.cli", "start", "--port", str(home.port), "--pipeline", write(tmp_path, line("a"))
    )
    with Path("/dev/full").open("wb") as full:
        home.process = subprocess.Popen(command, stderr=full, env=home.env)
    home.until(home.is_ready)
    before = home.process_of("broker.gateway")
    os.kill(before, signal.SIGKILL)
    home.until(
        lambda: [p for p, c in home.processes().items() if "broker.gateway" in c.split() and p != before]
    )
    home.until(home.is_ready)
    assert home.command("stop").returncode == 0
    assert home.process.wait(60) == 0


def test_a_host_that_others_reach_gets_a_warning(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--host", "0.0.0.0", "--no-workers", ready=False)
    home.until(lambda: home.get("/health")[0] == 200)
    assert "warning: 0.0.0.0 can be reached from other machines" in home.log


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pipeline", "ecko"], "did you mean echo?"),
        (["--pipeline", "echo", "--stage", "tonne.replicas=2"], "did you mean tone?"),
        (["--pipeline", "echo", "--stage", "tone.replica=2"], "did you mean replicas?"),
        (["--pipeline", "echo", "--stage", "tone.replicas=many"], "replicas"),
        (["--pipeline", "echo", "--pipeline", "echo"], "another pipeline's name"),
    ],
)
def test_bad_settings_are_refused_in_one_line(house: Houses, arguments: list[str], says: str) -> None:
    result = house().command("start", *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_run_folder_that_is_none_is_named(house: Houses, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        home = house(env={"OMNI_RUN_DIR": str(folder)})
        result = home.command("start", "--pipeline", "echo")
        assert result.returncode == 2
        assert "choose another with OMNI_RUN_DIR" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert "OMNI_RUN_DIR" in home.command("stop").stderr


def test_a_bad_log_level_is_refused(house: Houses) -> None:
    result = house().command("start", "--log-level", "loud")
    assert result.returncode == 2
    assert "DEBUG" in result.stderr


def test_a_taken_port_is_named(house: Houses, echo: House) -> None:
    refused = house().command("start", "--pipeline", "echo", "--port", str(echo.port))
    assert refused.returncode == 2
    says = f"can't listen on 127.0.0.1:{echo.port}: Address already in use; choose another with --port"
    assert refused.stderr == f"omni-broker: {says}\n"


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machine_is_named(house: Houses, host: str) -> None:
    refused = house().command("start", "--pipeline", "echo", "--host", host, "--api-key", "k")
    assert refused.returncode == 2
    assert f"can't listen on {host}:8000: " in refused.stderr
    assert "choose another with --host" in refused.stderr
    assert refused.stderr.count("\n") == 1
