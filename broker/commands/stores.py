"""Where `omni-broker start` keeps what must outlive processes: the disk, or a Mooncake."""

from __future__ import annotations

from broker.address import AddressError
from pipelines.errors import PipelineError
from pipelines.graph import Pipeline

STORES = ("disk", "mooncake")


def store_address(store: str, master: str | None, **settings: str | int | None) -> str:
    """The Mooncake's address for broker, engines and clients; "": the disk store.

    Raises AddressError where no master answers or Mooncake isn't installed, and for settings of a Mooncake
    that nobody asked for.

    Args:
        store: One of :data:`STORES`.
        master: HOST:PORT; not looked at for another store, since it may come from the environment.
        settings: Other fields of :class:`adapters.mooncake_client.Address`; None: as usual.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if store != "mooncake":
        if given:
            raise AddressError("--mooncake-... settings are of no use without --store mooncake")
        return ""
    from adapters.handle import AdapterError
    from adapters.mooncake_client import CURE, Address, library, probe

    if master is None:
        raise AddressError(f"--store mooncake needs a master: {CURE}")
    try:
        address = Address(master, **given)  # type: ignore[arg-type]
        address = Address.parse(str(address))
        library()
        probe(address)
    except (AdapterError, ValueError) as error:
        raise AddressError(str(error)) from None
    return str(address)


def check_transports(pipelines: list[Pipeline], store: str) -> None:
    """Raises PipelineError for an edge that sends its tensors to a Mooncake that isn't there."""
    for pipeline in pipelines:
        for number, edge in enumerate(pipeline.edges):
            if edge.transport == "mooncake" and not store:
                raise PipelineError(
                    f"mooncake, but this broker has none: start it with --store mooncake (pipeline "
                    f"{pipeline.name}, from {edge.from_} to {edge.to})",
                    key=f"edges[{number}].transport",
                )
