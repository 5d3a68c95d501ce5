"""A film's job whose gateway and broker are killed: its record, its file, and what was under way."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.house import House, write

Houses = Callable[..., House]

FILM = {
    "name": "film",
    "outputs": {"video": "film"},
    "stages": {
        "frames": {"engine": "function", "options": {"op": "film"}},
        "film": {"engine": "film"},
    },
    "edges": [{"from": "request", "to": "frames"}, {"from": "frames", "to": "film", "stream": False}],
    "endpoints": {"videos": {"outputs": ["video"]}},
}


def call(house: House, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(house.base_url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: bytes = response.read()
        return answer


def job(house: House, **fields: Any) -> str:
    body = {"prompt": "a boat", "seed": 1, "num_frames": 5, "size": "32x16", **fields}
    return str(json.loads(call(house, "POST", "/v1/videos", body))["id"])


def stands(house: House, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(house, "GET", f"/v1/videos/{name}"))
    return found


def completed(house: House, name: str) -> dict[str, Any]:
    house.until(lambda: stands(house, name)["status"] == "completed")
    return stands(house, name)


def test_films_survive_the_death_of_gateway_and_broker(house: Houses, tmp_path: Path) -> None:
    home = house("--pipeline", write(tmp_path, FILM))
    half_way = {"hang": True, "at": 1, "attempts": 1}  # until its engine is replaced
    done, slow = job(home), job(home, sampling_params_list=[half_way, None])
    before, file = completed(home, done), call(home, "GET", f"/v1/videos/{done}/content")
    home.until(lambda: stands(home, slow)["progress"] == 25)
    (engine,) = home.pids("film", "frames")
    for name in ("broker.gateway", "broker.server"):
        os.kill(home.process_of(name), signal.SIGKILL)
    home.until(lambda: home.get(f"/v1/videos/{done}")[0] == 200)
    assert stands(home, done) == before
    assert call(home, "GET", f"/v1/videos/{done}/content") == file
    assert stands(home, slow)["status"] == "in_progress"
    os.kill(engine, signal.SIGKILL)
    completed(home, slow)
    assert call(home, "GET", f"/v1/videos/{slow}/content") == file
    listed = json.loads(call(home, "GET", "/v1/videos"))["data"]
    assert {found["id"] for found in listed} == {done, slow}
    for name in (done, slow):
        call(home, "DELETE", f"/v1/videos/{name}")
