"""NaN and infinity at a stage border are found, with their place (C50)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from adapters.chunk import find_nonfinite

torch = pytest.importorskip("torch")

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ({}, None),
        ({"a": 1.0, "b": [2, "nan", b"", None, True], "c": np.zeros(0)}, None),
        ({"a": NAN}, "payload.a"),
        ({"a": [0.0, {"b": -INF}]}, "payload.a[1].b"),
        ({"a": np.float32(NAN)}, "payload.a"),
        ({"ok": np.zeros(3), "a": [np.array([0, NAN])]}, "payload.a[0]"),
        ({"a": np.array([0, 1j * INF])}, "payload.a"),
        ({"a": np.array([1, 2]), "b": np.array(["nan"]), "c": np.array([True])}, None),
        ({"a": np.array(INF)}, "payload.a"),
        ({"a": np.array([[3e38, 3e38]], np.float32)}, None),
        ({"a": torch.tensor([1.0, INF], dtype=torch.bfloat16)}, "payload.a"),
        ({"a": torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)}, "payload.a"),
        ({"a": torch.tensor([1.0, INF]).to(torch.float8_e5m2)}, "payload.a"),
        ({"a": torch.ones(3).to(torch.float8_e4m3fn), "b": torch.tensor([1, 2]), "c": torch.zeros(0)}, None),
        ({"a": torch.tensor([NAN], requires_grad=True)}, "payload.a"),
        ({"a": torch.tensor([1e300, -1e300], dtype=torch.float64)}, None),
    ],
)
def test_the_first_nonfinite_field_is_named(payload: dict[str, Any], path: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_nonfinite(payload) == path


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("at", [0, 17, 999])
def test_one_bad_value_anywhere_is_seen(bad: float, dtype: str, at: int) -> None:
    array = np.ones(1000, dtype)
    assert find_nonfinite({"x": array}) is None
    array[at] = bad
    assert find_nonfinite({"x": array[::-1]}) == "payload.x"
