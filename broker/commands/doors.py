"""What `omni-broker start` is told of who may come in, checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from broker.address import AddressError, endpoints, is_loopback, keys_dir

API_KEY_VARIABLE = "OMNI_API_KEY"


def use_keys(folder: Path | None) -> None:
    """Makes this process and all that it starts use the keys of a folder."""
    if folder is not None:
        os.environ["OMNI_KEYS"] = str(folder.absolute())


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
    """The lines of all API keys. Raises ApiKeysError for one that can't be used."""
    from broker.gateway.keys import ApiKeys, read_lines

    os.environ.pop(API_KEY_VARIABLE, None)  # the workers need not know it
    ApiKeys.parse(given, "--api-key")
    lines = [*given, *(read_lines(file) if file is not None else ())]
    keys = ApiKeys.parse(lines, str(file) if file is not None and not given else "the API keys")
    if file is not None and not keys:
        from broker.gateway.keys import ApiKeysError

        raise ApiKeysError(f"{file} holds no key: write `name key` or `key` in each line")
    return tuple(lines) if keys else ()
