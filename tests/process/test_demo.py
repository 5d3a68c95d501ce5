"""The server of `scripts/demo`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from openai import OpenAI

from scripts.demonstration import server, wait_until_ready
from scripts.leftovers import files_in


def test_the_demo_stops_its_server_in_order(leaves_nothing: Path) -> None:
    """Told twice, it would kill its processes: their memory would stay for a broker that never comes back."""
    with tempfile.TemporaryDirectory(prefix="omni-demo-") as name:
        folder = Path(name)
        with server(folder, "echo") as (url, log):
            wait_until_ready(url, log)
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
            client.audio.speech.create(model="echo", voice="alloy", input="word " * 100)
            client.close()
        assert log.read_text().splitlines()[-1] == "stopped"
        assert "killed" not in log.read_text()
        assert files_in(folder / "state") == files_in(folder / "run") == []
    assert files_in(leaves_nothing / "shm") == []
