"""What goes wrong in a world, and how often.

Each world has some of the mishaps and not others (swarm testing, Groce et al. 2012): a world in which
everything dies all the time never gets far enough for the rare sequences.
"""

from __future__ import annotations

import random

#: Mishap -> how likely in one step, where a world has it
RATES = {
    "abort": 0.02,
    "kill_engine": 0.015,
    "drain": 0.006,
    "kill_guardian": 0.005,
    "stop_guardian": 0.004,
    "kill_client": 0.006,
    "stop_client": 0.003,
    "leave_client": 0.002,
    "take_over": 0.004,
    "cut": 0.003,
    "kill_broker": 0.008,
    "kill_host": 0.002,
    "letters": 0.005,
    "more": 0.004,
}
#: Mishap -> how likely in one step of a job
JOB_RATES = {"item": 0.03, "hang": 0.003, "spill": 0.1}


class Faults:
    """Some mishaps with their rates, drawn at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rates = [(name, rate) for name, usual in RATES.items() if (rate := self._draw(rng, usual))]
        self.jobs = {name: self._draw(rng, rate) for name, rate in JOB_RATES.items()}
        #: What edges may keep
        self.checkpoints = rng.sample(["none", "memory", "disk"], rng.randint(1, 3))

    @staticmethod
    def _draw(rng: random.Random, rate: float) -> float:
        return rate * rng.uniform(0.3, 2.0) if rng.random() < 0.5 else 0.0

    def stop(self) -> None:
        """Peace."""
        self.rates = []
        self.jobs = dict.fromkeys(self.jobs, 0.0)
