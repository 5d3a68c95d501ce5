"""What the stages make of a request is what transformers makes of it, on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.families.qwen3_omni.reference import Reference
from tests.families.requests import REQUESTS
from tests.families.rig import running


async def test_text_codes_and_waveform_are_those_of_transformers(
    checkpoint: Path, reference: Reference, subtests: pytest.Subtests
) -> None:
    async with running(checkpoint) as rig:
        for name, request in REQUESTS.items():
            with subtests.test(name):
                said = reference.answer(request)
                answer = await rig.answer(request)
                assert answer.tokens == said.tokens
                np.testing.assert_array_equal(answer.codes, said.codes)
                # Sixteen frames are two windows, whose left context is all that came before.
                np.testing.assert_allclose(answer.wave, said.wave, rtol=0, atol=1e-4)
