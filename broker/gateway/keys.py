"""API keys: who may ask, and whose share of the stages a request counts against.

Keys come as lines, ``name key`` or just ``key``; ``#`` begins a comment. Only their hashes are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self


class ApiKeysError(ValueError):
    """Keys that can't be used; the message names the place and the cure, and never shows a key."""


class ApiKeys:
    """The keys that are let in; with none at all everybody is.

    Args:
        tenants: A key's SHA-256 -> the name of who has it.
    """

    def __init__(self, tenants: Mapping[bytes, str] | None = None) -> None:
        self._tenants = dict(tenants or {})

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @classmethod
    def parse(cls, lines: Iterable[str], where: str) -> Self:
        """Reads lines. Raises ApiKeysError for one that is no key, and for a key that comes twice.

        A key without a name is named after its hash. Several keys may have one name, so that a key can be
        replaced while the old one still works.

        Args:
            lines: Their text.
            where: What errors call their place.
        """
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            key = words[-1]
            if len(words) > 2 or not key.isascii():
                raise ApiKeysError(f"{where}, line {number}: write `name key` or `key`, in ASCII")
            digest = _digest(key)
            if digest in tenants:
                raise ApiKeysError(
                    f"{where}, line {number}: this key was there already, take one of them out"
                )
            tenants[digest] = words[0] if len(words) == 2 else f"key-{digest.hex()[:12]}"
        return cls(tenants)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file. Raises ApiKeysError as `parse` does, and for a file that others may read."""
        return cls.parse(read_lines(path), str(path))

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The name of who sent these headers; "" where no keys are set.

        Raises ApiError 401 without a key that is let in.
        """
        if not self._tenants:
            return ""
        scheme, _, key = headers.get("Authorization", "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise _refusal("an API key is needed: send it as `Authorization: Bearer KEY`")
        digest, found = _digest(key), None
        for known, name in self._tenants.items():  # all of them: the time must not tell which one came near
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise _refusal("this API key is not known here")
        return found


def read_lines(path: Path) -> list[str]:
    """A key file's lines. Raises ApiKeysError when it can't be read, or others may read it."""
    try:
        with path.open(encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ApiKeysError(f"others can read or change {path}; close it: `chmod go= {path}`")
            return file.read().splitlines()
    except OSError as error:
        raise ApiKeysError(f"the API keys {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ApiKeysError(f"{path} is no text file: write `name key` or `key` in each line") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refusal(message: str) -> Exception:
    from broker.gateway.errors import ApiError  # not at the head: `omni-broker start` needs none of it

    return ApiError(message, status=401, code="invalid_api_key")
