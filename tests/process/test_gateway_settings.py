"""What `omni-broker start` is told of the gateway's bounds reaches the gateway."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.gateway.settings import Option, Settings, add_options, options
from tests.house import House

Houses = Callable[..., House]

BOUNDS = [option for option in options() if option.name != "api_keys"]  # `start` gives the gateway a file


def other(option: Option) -> Any:
    """A value that is not the default; of seconds so many that no pause of ours is as long."""
    if option.kind is bool:
        return True
    if option.kind is list:
        return ["a.example.org", ".example.com"]
    return option.kind(33 if option.name.endswith("_s") else 3)


def refusal(home: House, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the field of a chat's error."""
    request = urllib.request.Request(
        f"{home.base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as response:
        return response.code, json.loads(response.read())["error"]["param"]


def test_every_bound_that_start_is_told_holds_in_the_gateway(house: Houses) -> None:
    words = [word for option in BOUNDS for word in option.words(other(option))]
    home = house("--pipeline", "echo", "--no-workers", *words, ready=False)
    home.until(lambda: home.get("/ready")[0] == 503)
    command = Path(f"/proc/{home.process_of('broker.gateway')}/cmdline").read_text().split("\0")
    parser = argparse.ArgumentParser()
    add_options(parser)
    got = Settings(**vars(parser.parse_known_args(command)[0]))
    assert {option.name: getattr(got, option.name) for option in BOUNDS} == {
        option.name: other(option) for option in BOUNDS
    }
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    assert refusal(home, {**hello, "n": 4}) == (400, "n")
    assert refusal(home, {"messages": [{"role": "user", "content": "x" * (3 << 20)}]})[0] == 413


@pytest.mark.parametrize("option", [option for option in BOUNDS if option.kind in (int, float)])
def test_a_bound_that_lets_nothing_through_is_refused(option: Option) -> None:
    with pytest.raises(ValueError, match=option.flag):
        Settings(**{option.name: option.kind(0)})


def test_a_bound_that_is_none_is_refused_before_anything_starts(house: Houses) -> None:
    result = house().command("start", "--pipeline", "echo", "--max-open", "0")
    assert result.returncode == 2
    assert result.stderr == "omni-broker: --max-open 0: must be a number above 0\n"


def test_the_help_tells_what_each_bound_is(house: Houses) -> None:
    text = " ".join(house().command("start", "--help").stdout.split())
    for option in BOUNDS:
        assert f"{option.flag} " in text
        assert option.help in text
