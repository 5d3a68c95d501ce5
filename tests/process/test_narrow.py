"""Tables on narrow terminals: columns go before figures are cut."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from broker.commands.tables import table

HEADS = ("stage", "engine", "queued", "running", "done", "failed")
ROWS = [
    ["glm_image/denoiser", "diffusers", 123456, 7, 1234567, 89],
    ["voice/ears", "whisper", 21, 30, 55, 60],
]


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 80, 120])
def test_a_figure_that_is_shown_is_whole(width: int) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(
            table("Stages", HEADS, ROWS, width=width, spare=("engine", "done", "failed", "running"))
        )
    said = captured.get()
    shown = [int(figure) for figure in re.findall(r"\d+", said)]
    assert shown == [cell for row in ROWS for cell in row if cell in shown]
    assert 123456 in shown
    assert all(len(line) <= width for line in said.splitlines())
    assert (1234567 in shown) == (width >= 60)
    assert ("whisper" in said) == (width >= 80)
