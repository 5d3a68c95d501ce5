"""What `omni-broker start` says while models load, and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.house import House, line, write

Houses = Callable[..., House]


def test_it_says_where_to_go_once_all_stages_have_a_worker(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, line("a", "b")))
    home.until(lambda: "ready after" in home.log)
    (says,) = [text for text in home.log.splitlines() if text.startswith("ready after")]
    assert says.endswith(f"http://127.0.0.1:{home.port}")
    home.until(lambda: "supervisor" not in [client["kind"] for client in home.status()["clients"]])


def test_stages_without_replicas_are_not_waited_for(house: Houses, tmp_path: Path) -> None:
    document = line("a", "b")
    document["stages"]["b"]["resources"] = {"replicas": 0}
    home = house("--pipeline", write(tmp_path, document), ready=False)
    home.until(lambda: "ready after" in home.log)
    assert home.status()["missing"] == ["line/b"]


def test_what_can_not_load_is_named_again_and_again(house: Houses, tmp_path: Path) -> None:
    document = line("a", "b")
    document["stages"]["b"] = {"engine": "json:Absent"}
    home = house("--pipeline", write(tmp_path, document), ready=False)
    home.until(lambda: "loading line/b (" in home.log)  # and not `a`, once that one is there
    assert "silent" not in home.log, "the broker lost sight of the supervisor"
