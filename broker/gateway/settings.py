"""The gateway's bounds, each of them a command line option (see ``__main__``)."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What callers may ask of the gateway."""

    max_body_mb: float = 48.0  #: MiB of a request's body; more is refused with 413
    max_audio_mb: float = 25.0  #: MiB of one uploaded audio file, as uploaded
    max_audio_s: float = 1800.0  #: seconds of audio in one request, decoded
    max_choices: int = 16  #: the largest `n`
    stall_s: float = 30.0  #: a client that takes nothing for so long loses its request
    probe_s: float = 2.0  #: how long /ready and /metrics wait for the broker
