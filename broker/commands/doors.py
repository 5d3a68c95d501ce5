"""What `omni-broker start` is told of who may come in, checked before anything starts."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from broker.address import AddressError, endpoints, is_loopback, keys_dir

API_KEY_VARIABLE = "OMNI_API_KEY"


def check_listen(address: str | None) -> None:
    """Raises AddressError for a ``--listen`` that can't be opened, or that would be open to anybody."""
    if address is None:
        return
    if not address.startswith("tcp://"):
        raise AddressError(f"--listen takes tcp://host:port, not {address!r}")
    endpoints(address)
    from broker.keys import Keys

    keys = Keys.find()
    if keys is not None:
        keys.need_server()


def check_free(host: str, port: int, listen: str | None) -> None:
    """Raises AddressError where nobody can listen: another does already, or the host is not this machine.

    The gateway and the broker would say so too, but again and again, while models are loaded for nothing.

    Args:
        host: The gateway's; "" without one.
        port: Its port; 0: whichever is free.
        listen: The broker's TCP address, if it has one.
    """
    if host:
        _check_free(host, port, f"on {host}:{port}", "--host", "--port")
    if listen is not None:
        parts = urlsplit(listen)
        for number in (parts.port or 0, (parts.port or 0) + 1):
            _check_free(parts.hostname or "", number, f"at {listen}", "--listen", "--listen")


def _check_free(host: str, port: int, where: str, for_host: str, for_port: str) -> None:
    failed: OSError | None = None
    free = False
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                socket.create_server(address[:2], family=family).close()
                free = True
            except OSError as error:
                if failed is None or error.errno in (errno.EADDRINUSE, errno.EACCES):
                    failed = error
    except OSError as error:  # no such name
        failed = error
    if failed is None or (
        free and failed.errno == errno.EADDRNOTAVAIL
    ):  # a name may have an address too many
        return
    cure = for_port if failed.errno in (errno.EADDRINUSE, errno.EACCES) else for_host
    named = isinstance(failed, socket.gaierror)  # others' words have the address in them once more
    why = failed.strerror if named else os.strerror(failed.errno or 0)
    raise AddressError(f"can't listen {where}: {why}; choose another with {cure}")


def use_data_host(chosen: str | None, listen: str | None) -> None:
    """Has this machine's gateway and workers serve their tensors to other machines, where there may be some.

    Args:
        chosen: Where; by default where the broker listens.
        listen: The broker's TCP address, if it has one.

    Raises AddressError where that can't be, or would be open to anybody.
    """
    if chosen is None and listen is None:
        return
    from broker.serving import VARIABLE, data_address, own_address

    host = chosen or urlsplit(listen or "").hostname or ""
    address = own_address() if chosen is None and host in ("0.0.0.0", "::") else data_address("", host)
    if not is_loopback(address or "") and keys_dir() is None:
        raise AddressError(
            f"--data-host {host}: tensors are sent to other machines with keys only, see --keys"
        )
    os.environ[VARIABLE] = address or ""


def check_ray(listen: str | None) -> None:
    """Raises AddressError where workers can't be placed on Ray: it is not here, or they can't come back."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise AddressError("--placement ray needs Ray: `pip install 'omni-broker[ray]'`, on every node")
    if listen is None:
        raise AddressError("--placement ray needs --listen tcp://HOST:PORT, where workers come back to")


def api_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """The lines of all API keys: the options', the variable's, the file's.

    Raises ApiKeysError for one that can't be used, and for a place that was named and holds none: who meant
    to close the door (`--api-key "$KEY"`, and KEY is empty) must not find it open.
    """
    from broker.gateway.keys import ApiKeys, ApiKeysError, read_lines

    variable = os.environ.pop(API_KEY_VARIABLE, None)  # the workers need not know it
    places = [("--api-key", text.splitlines()) for text in given]
    if variable is not None:
        places.append((API_KEY_VARIABLE, variable.splitlines()))
    if file is not None:
        places.append((str(file), read_lines(file)))
    for where, lines in places:
        if not ApiKeys.parse(lines, where):
            raise ApiKeysError(f"{where} holds no key: write `name key` or `key`, a line each")
    every = [line for _, lines in places for line in lines]
    ApiKeys.parse(every, "the API keys")
    return tuple(every)
