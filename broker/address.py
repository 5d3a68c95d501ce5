"""Where the broker's sockets are, and who may reach them.

By default both sockets are ipc files in the run folder, which only its owner may enter. A TCP address names
the workers' port; clients use the next one. TCP beyond loopback needs keys (see :mod:`broker.keys`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class AddressError(ValueError):
    """An address or run folder that can't be used; the message names the cure."""


class Endpoints(NamedTuple):
    """The two ZeroMQ endpoints of one broker."""

    workers: str
    clients: str


def run_dir() -> Path:
    """``OMNI_RUN_DIR``, else ``omni-broker`` in ``XDG_RUNTIME_DIR``, else a folder per user in /tmp."""
    if chosen := os.environ.get("OMNI_RUN_DIR"):
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "omni-broker"
    return Path(tempfile.gettempdir()) / f"omni-broker-{os.getuid()}"


def state_dir() -> Path:
    """Where a broker's journal and disk store are: on a real disk, unlike the run folder.

    ``OMNI_STATE_DIR``, else ``omni-broker/NAME`` in ``XDG_STATE_HOME`` or ~/.local/state; NAME is "default",
    or stands for the run folder that ``OMNI_RUN_DIR`` names: each broker has a state of its own.
    """
    if chosen := os.environ.get("OMNI_STATE_DIR"):
        return Path(chosen)
    home = os.environ.get("XDG_STATE_HOME")
    base = Path(home) if home else Path.home() / ".local" / "state"
    own = os.environ.get("OMNI_RUN_DIR")
    name = hashlib.sha256(os.fsencode(Path(own).absolute())).hexdigest()[:12] if own else "default"
    return base / "omni-broker" / name


def make_state_dir(path: Path) -> Path:
    """Creates the state folder with mode 0700, or closes an existing one of ours to others.

    Raises AddressError when it belongs to somebody else, is no folder, or can't be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
        ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
    except OSError as error:
        raise AddressError(
            f"{path} can't be made ({error.strerror}); choose another with OMNI_STATE_DIR"
        ) from None
    if not ours:
        raise AddressError(f"{path} is not a folder of yours; choose another with OMNI_STATE_DIR")
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path


def make_run_dir(path: Path) -> Path:
    """Creates the run folder with mode 0700, or checks that an existing one is ours and closed to others.

    Raises AddressError when it belongs to somebody else, is no folder, can't be made, or its path is too long
    for a socket.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise AddressError(
            f"{path} can't be made ({error.strerror}); choose another with OMNI_RUN_DIR"
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise AddressError(f"{path} is not a folder of yours; choose another with OMNI_RUN_DIR")
    if info.st_mode & 0o077:
        path.chmod(0o700)
    if len(os.fsencode(path)) > 80:
        raise AddressError(f"{path} is too long for a socket's path; choose a shorter OMNI_RUN_DIR")
    return path


def keys_dir() -> Path | None:
    """``OMNI_KEYS``, else the default folder if it is there; None: this process has no keys."""
    if chosen := os.environ.get("OMNI_KEYS"):
        return Path(chosen)
    default = default_keys_dir()
    return default if default.is_dir() else None


def default_keys_dir() -> Path:
    """Where `omni-broker keys` puts them: ``omni-broker/keys`` in ``XDG_CONFIG_HOME`` or ``~/.config``."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "omni-broker" / "keys"


def endpoints(address: str | None = None) -> Endpoints:
    """The two endpoints for ``None`` (the run folder), ``ipc:///folder`` or ``tcp://host:port``.

    Raises AddressError for anything else, and for TCP hosts other than loopback where there are no keys.
    """
    if address is None:
        address = f"ipc://{run_dir()}"
    refusal = AddressError(f"{address!r} is no broker address; use ipc:///folder or tcp://host:port")
    try:
        parts = urlsplit(address)
        if parts.scheme == "ipc" and parts.path:
            folder = parts.netloc + parts.path
            return Endpoints(f"ipc://{folder}/workers.sock", f"ipc://{folder}/clients.sock")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refusal from None
    if parts.scheme != "tcp" or not host or not port or port == 65535:
        raise refusal
    if not is_loopback(host) and keys_dir() is None:
        raise AddressError(
            f"{host} is not a loopback address, and connections beyond it need keys: make them with "
            "`omni-broker keys`, or name their folder with --keys or OMNI_KEYS"
        )
    name = f"[{host}]" if ":" in host else host
    return Endpoints(f"tcp://{name}:{port}", f"tcp://{name}:{port + 1}")


def cure(endpoint: str) -> str:
    """What to do when nobody answers at an endpoint."""
    found = "start a broker with `omni-broker start`, or name its address"
    if endpoint.startswith("tcp://"):
        return f"{found}; over TCP it answers only those who have its keys (--keys, or OMNI_KEYS)"
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host's name or number."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
