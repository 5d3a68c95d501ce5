"""What `omni-broker start` is told of who may come in, checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from broker.address import AddressError, endpoints, is_loopback, keys_dir, make_run_dir, run_dir

API_KEY_VARIABLE = "OMNI_API_KEY"


def run_folder() -> Path:
    """The run folder, made. Raises AddressError where it can't be."""
    chosen = run_dir()
    try:
        return make_run_dir(chosen)
    except OSError as error:
        raise AddressError(
            f"{chosen} can't be made ({error.strerror}); choose another with OMNI_RUN_DIR"
        ) from None


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
