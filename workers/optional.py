"""Libraries that only some engines need."""

from __future__ import annotations


class MissingLibrary(RuntimeError):
    """An optional library is absent; the message names the command that installs it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; run: pip install 'omni-broker[{extra}]'")
