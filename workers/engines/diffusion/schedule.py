"""Schedules: each canvas has a diffusers scheduler of its own, copied from the checkpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.chunk import Payload
from workers.engines.diffusion.tensors import as_tensor, copied

if TYPE_CHECKING:
    import torch

#: What multi-step schedulers of diffusers remember of earlier steps; single-step ones have none of it.
_LISTS = ("model_outputs", "timestep_list")
_VALUES = ("lower_order_nums", "this_order", "last_sample")


def scheduler_for(template: Any, *, device: Any = None, **settings: Any) -> Any:
    """A scheduler like this one with a schedule of its own.

    Args:
        template: As loaded from the checkpoint; it stays as it is.
        device: Where the timesteps shall be.
        settings: Of the scheduler's ``set_timesteps``: num_inference_steps, sigmas, mu, ...

    Raises ValueError for a scheduler that draws noise at each step: a step would depend on what ran before.
    """
    config = dict(template.config)
    if config.get("stochastic_sampling"):
        raise ValueError("the checkpoint's scheduler draws noise at each step, which can't be resumed")
    if config.get("shift_terminal") and _steps(settings) == 1:
        # The terminal shift stretches the schedule between its first and its last step; with one there is
        # nothing to stretch, and diffusers divides zero by zero.
        config["shift_terminal"] = None
    scheduler = type(template).from_config(config)
    scheduler.set_timesteps(device=device, **settings)
    scheduler.set_begin_index(0)
    return scheduler


def _steps(settings: dict[str, Any]) -> int:
    if settings.get("num_inference_steps") is not None:
        return int(settings["num_inference_steps"])
    given = settings.get("sigmas") if settings.get("sigmas") is not None else settings.get("timesteps")
    return 0 if given is None else len(given)


def history(scheduler: Any) -> Payload:
    """What a scheduler remembers of earlier steps, in a form that a payload can have."""
    state: Payload = {}
    for name in _LISTS:
        if (kept := getattr(scheduler, name, None)) is not None:
            # The newest stand last, the places before them are None.
            state[name] = [copied(item) for item in kept if item is not None]
    for name in _VALUES:
        if (value := getattr(scheduler, name, None)) is not None:
            state[name] = copied(value)
    return state


def go_on(scheduler: Any, state: Payload, step: int, like: torch.Tensor) -> None:
    """Puts a scheduler that has just been made where ``history`` was taken, before this step.

    Args:
        scheduler: By :func:`scheduler_for`.
        state: With what :func:`history` gave.
        step: The one that comes next.
        like: Tensors go to its device.
    """
    import torch

    def back(value: Any) -> Any:
        return value if isinstance(value, int | float) else torch.clone(as_tensor(value)).to(like.device)

    scheduler.set_begin_index(step)
    for name in _LISTS:
        if name in state:
            kept = [back(item) for item in state[name]]
            setattr(scheduler, name, [None] * (len(getattr(scheduler, name)) - len(kept)) + kept)
    for name in _VALUES:
        if name in state:
            setattr(scheduler, name, back(state[name]))
