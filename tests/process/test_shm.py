"""`omni-broker shm`: what it shows, and that it removes what is dead and nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adapters.arena import SharedMemory
from adapters.sweep import Keep
from scripts.leftovers import files_in
from tests.house import House, line, write

Houses = Callable[..., House]

ALIVE, KEPT, DEAD = "a1" * 8, "b2" * 8, "c3" * 8
PRODUCE = """
import os, signal, sys
import numpy as np
from adapters.arena import SharedMemory
SharedMemory(sys.argv[1], first_segment=1 << 20).put(np.zeros(10))
os.kill(os.getpid(), signal.SIGKILL)
"""


def dead_producer(home: House, run: str) -> str:
    """A segment whose owner was killed."""
    subprocess.run([sys.executable, "-c", PRODUCE, run], env=home.env, check=False)
    (name,) = (name for name in os.listdir(home.shm_dir) if name.startswith(f"omni-{run}-"))
    return name


def test_without_anything_it_says_so(house: Houses) -> None:
    home = house()
    for arguments in ((), ("list",)):
        listed = home.command("shm", *arguments)
        assert (listed.returncode, listed.stderr) == (0, "")
        assert listed.stdout == f"0 segments, 0.0 MiB in {home.shm_dir}\n"
    assert home.command("shm", "sweep").stdout == f"removed 0 files, 0.0 MiB from {home.shm_dir}\n"


def test_it_shows_who_lives_and_sweeps_who_does_not(house: Houses, tmp_path: Path) -> None:
    home = house()
    journal = tmp_path / "journal.db"
    journal.touch()
    dead, kept = dead_producer(home, DEAD), dead_producer(home, KEPT)
    Keep(KEPT, journal, home.shm_dir)
    with SharedMemory(ALIVE, folder=home.shm_dir, first_segment=2 << 20) as arena:
        alive = arena.put(np.zeros(10)).block.place
        lines = home.command("shm").stdout.splitlines()
        rows = {line.split()[0]: line.rstrip().split(maxsplit=3)[1:] for line in lines}
        assert rows[alive] == ["2.0", "alive", "alive"]
        assert rows[kept] == ["1.0", "dead", "kept: its broker may come back"]
        assert rows[dead] == ["1.0", "dead", "dead"]
        assert home.command("shm", "list").stdout.endswith(f"3 segments, 4.0 MiB in {home.shm_dir}\n")

        swept = home.command("shm", "sweep")
        assert (swept.returncode, swept.stdout) == (0, f"removed 1 file, 1.0 MiB from {home.shm_dir}\n")
        assert "left alone: 1 kept run" in swept.stderr
        assert "--force" in swept.stderr
        assert set(os.listdir(home.shm_dir)) == {alive, kept, f"omni-{KEPT}-kept"}

        forced = home.command("shm", "sweep", "--force")
        assert (forced.returncode, forced.stdout) == (0, f"removed 1 file, 1.0 MiB from {home.shm_dir}\n")
        assert "warning" in forced.stderr
        assert "unfinished requests" in forced.stderr
        assert os.listdir(home.shm_dir) == [alive]
    assert journal.exists()


def test_a_sweep_beside_a_running_broker_costs_it_nothing(echo: House) -> None:
    assert echo.command("ask", "before").returncode == 0
    assert echo.command("shm", "sweep", "--force").returncode == 0
    asked = echo.command("ask", "and after")
    assert (asked.returncode, asked.stdout) == (0, "and after\n")


def test_start_refuses_more_shared_memory_than_there_is(house: Houses) -> None:
    home = house(env={"OMNI_SHM_MB": "99999999"})
    refused = home.command("start", "--pipeline", "echo")
    assert refused.returncode == 2
    assert "--shm-size" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


async def test_payloads_over_the_ceiling_go_by_disk_and_leave_nothing_there(
    house: Houses, tmp_path: Path
) -> None:
    home = house("--pipeline", write(tmp_path, line("a", "b")), env={"OMNI_SHM_MB": "4"})
    payload = {"x": np.arange(5 << 18, dtype=np.float32)}
    async with home.client() as client:
        for _ in range(3):
            given = {"request": [payload]}
            async with await client.submit("line", outputs=["text"], given=given) as stream:
                got = [payload async for _, payload in stream]
            assert len(got) == 1
            assert (got[0]["x"] == payload["x"]).all()
        await asyncio.to_thread(home.until, lambda: files_in(home.state_dir / "chunks") == ["name"])
