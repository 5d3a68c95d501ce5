"""Faults that a request can ask the ``function`` engine for, to see what a pipeline makes of them."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from adapters.chunk import Payload
from workers.engine import ItemError, Job
from workers.params import checked

Seconds = Annotated[float, Meta(ge=0, le=3600)]


class Faults(msgspec.Struct, frozen=True, rename={"raise_": "raise"}):
    """Parameters of a ``function`` stage; all but ``chunk_sleep_s`` act just before chunk ``at``."""

    chunk_sleep_s: Seconds = 0.0  #: pause before every chunk
    sleep_s: Seconds = 0.0
    raise_: bool | str = False  #: fail with this message
    hang: bool = False  #: wait for ever (a cancel ends it)
    exit: bool | Annotated[int, Meta(ge=0, le=255)] = False  #: end the process with this code; true: 1
    hold_gil_s: Seconds = 0.0  #: let no Python thread of the process run for so long
    nan: bool = False  #: put NaN into the chunk
    at: Annotated[int, Meta(ge=0)] = 0  #: the chunk's number, from 0
    attempts: Annotated[int, Meta(ge=1)] | None = None  #: only in attempts up to this one; None: in all

    @classmethod
    def of(cls, job: Job) -> Faults:
        """The faults that a job asks for. Raises :class:`ItemError` (400) for a parameter of wrong type."""
        return checked(job.params, cls)

    async def strike(self, job: Job, number: int, payload: Payload) -> Payload:
        """What is to happen before chunk ``number`` goes out. Returns the payload to send."""
        if self.chunk_sleep_s:
            await asyncio.sleep(self.chunk_sleep_s)
        if number != self.at or (self.attempts is not None and job.attempt > self.attempts):
            return payload
        if self.sleep_s:
            await asyncio.sleep(self.sleep_s)
        if self.hold_gil_s:
            hold_gil(self.hold_gil_s)
        if self.raise_:
            message = self.raise_ if isinstance(self.raise_, str) else "raised on demand"
            raise ItemError(f"{message} (chunk {number}, attempt {job.attempt})")
        if self.exit is not False:
            os._exit(int(self.exit))
        if self.hang:
            await asyncio.Event().wait()
        return spoilt(payload) if self.nan else payload


def hold_gil(seconds: float) -> None:
    """Blocks the whole interpreter, as a C extension does that never lets the GIL go."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))  # PyDLL calls keep the GIL


def spoilt(payload: Payload) -> Payload:
    """The payload with NaN in its first float tensor, or in a field ``nan`` where it has none."""
    for key, value in payload.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size:
            bad = value.copy()
            bad.flat[0] = math.nan
            return {**payload, key: bad}
    return {**payload, "nan": math.nan}
