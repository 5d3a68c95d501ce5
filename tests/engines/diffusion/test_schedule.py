"""Schedules of one step, schedules that go on where another left off, and which steps give pictures."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from workers.engines.diffusion.painting import partial_steps  # noqa: E402
from workers.engines.diffusion.schedule import go_on, history, scheduler_for  # noqa: E402

#: Every kind of schedule that a family here has: its template, and what its steps are set with.
EULER = diffusers.FlowMatchEulerDiscreteScheduler
UNIPC = diffusers.UniPCMultistepScheduler
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "euler": (EULER(shift=3.0), {}),
    "shifted by size": (EULER(use_dynamic_shifting=True), {"mu": 0.9}),
    "shifted by size to a terminal": (EULER(use_dynamic_shifting=True, shift_terminal=0.1), {"mu": 0.9}),
    "to a terminal": (EULER(shift=3.0, shift_terminal=0.1), {}),
    "two orders": (UNIPC(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0), {}),
}


def steps(scheduler: Any, latents: Any, first: int, last: int) -> Any:
    """Takes steps; what a transformer would say depends on the latents."""
    for step in range(first, last):
        said = torch.tanh(latents * 1.7 + step)
        latents = scheduler.step(said, scheduler.timesteps[step], latents, return_dict=False)[0]
    return latents


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_goes_from_noise_to_the_end(kind: str) -> None:
    template, settings = KINDS[kind]
    scheduler = scheduler_for(template, num_inference_steps=1, **settings)
    assert len(scheduler.timesteps) == 1
    latents = torch.linspace(-2, 2, 8).reshape(1, 2, 2, 2)
    assert torch.isfinite(steps(scheduler, latents, 0, 1)).all()
    if kind != "two orders":
        assert scheduler.sigmas.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_several_steps_are_those_of_diffusers(kind: str) -> None:
    template, settings = KINDS[kind]
    own = type(template).from_config(template.config)
    own.set_timesteps(num_inference_steps=5, **settings)
    ours = scheduler_for(template, num_inference_steps=5, **settings)
    assert torch.equal(ours.timesteps, own.timesteps)
    assert torch.equal(ours.sigmas, own.sigmas)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_goes_on_after_any_step_to_the_bit(kind: str) -> None:
    template, settings = KINDS[kind]
    latents = torch.linspace(-2, 2, 8).reshape(1, 2, 2, 2)
    whole = steps(scheduler_for(template, num_inference_steps=6, **settings), latents, 0, 6)
    for after in range(7):
        first = scheduler_for(template, num_inference_steps=6, **settings)
        there = steps(first, latents, 0, after)
        state = history(first)
        second = scheduler_for(template, num_inference_steps=6, **settings)
        go_on(second, state, after, latents)
        assert torch.equal(steps(second, there, after, 6), whole)
        del first


def test_a_state_does_not_change_while_the_schedule_goes_on() -> None:
    template, _ = KINDS["two orders"]
    scheduler = scheduler_for(template, num_inference_steps=6)
    latents = steps(scheduler, torch.ones(1, 2, 2, 2), 0, 3)
    state = history(scheduler)
    before = [output.clone() for output in state["model_outputs"]]
    steps(scheduler, latents, 3, 6)
    assert all(torch.equal(one, other) for one, other in zip(state["model_outputs"], before, strict=True))


def test_a_scheduler_that_draws_noise_at_each_step_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be resumed"):
        scheduler_for(EULER(stochastic_sampling=True), num_inference_steps=4)


def test_pictures_on_the_way_are_spread_evenly_and_none_is_the_last() -> None:
    assert partial_steps(0, 28, 3) == [7, 14, 21]
    assert partial_steps(20, 28, 1) == [24]  # a given picture keeps the first twenty
    for steps_ in range(1, 9):
        for count in range(4):
            given = partial_steps(0, steps_, count)
            assert len(given) <= count
            assert all(0 < step < steps_ for step in given)
            if steps_ > count:
                assert len(given) == count
