"""`omni-broker start`: the broker, its gateway and its workers, until told to stop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.commands import doors
from broker.commands.bounds import with_gateway_settings
from broker.commands.common import USAGE, Enduring, Keys, say, use_keys
from broker.commands.doors import API_KEY_VARIABLE
from broker.commands.stores import STORES

PLACEMENTS = ("local", "ray")
CHECKPOINTS = ("none", "memory", "disk")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _level(text: str) -> str:
    if text.upper() not in LEVELS:
        raise typer.BadParameter(f"one of {', '.join(LEVELS)}")
    return text.upper()


def _checkpoint(text: str | None) -> str | None:
    if text not in (None, *CHECKPOINTS):
        raise typer.BadParameter(f"one of {', '.join(CHECKPOINTS)}")
    return text


def _placement(text: str) -> str:
    if text not in PLACEMENTS:
        raise typer.BadParameter(f"one of {', '.join(PLACEMENTS)}")
    return text


def _store(text: str) -> str:
    if text not in STORES:
        raise typer.BadParameter(f"one of {', '.join(STORES)}")
    return text


@with_gateway_settings
def start(  # noqa: PLR0917 - the options of a command line
    pipeline: Annotated[
        list[str] | None,
        typer.Option(
            "--pipeline",
            "--omni-stage-config",
            help="A pipeline that ships, a YAML file, or a folder with a pipeline.yaml. Repeat it for more. "
            "Default: voice.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="The model of all stages that have one: a name of `omni-broker models list`, a Hugging Face "
            "id, a folder, or tiny-random. With several pipelines: PIPELINE=NAME."
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting of one stage, like thinker.max_num_seqs=32; with several pipelines it goes to "
            "each that has the stage, or name one: voice/thinker.max_num_seqs=32. Repeat it for more."
        ),
    ] = None,
    enable_teacache: Annotated[
        bool,
        typer.Option(
            "--enable-teacache",
            help="Denoisers leave most of the model out in steps in which little changes, at some cost to "
            "the picture: all of them whose pipeline has cache_coefficients.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Where the gateway listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0 picks a free one.", min=0, max=65535)] = 8000,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="What all edges' chunks survive: none, memory (every process's death), disk (the machine's "
            "too). Default: what each pipeline says.",
            callback=_checkpoint,
        ),
    ] = None,
    journal: Annotated[
        bool, typer.Option(help="Keep a journal, so that requests survive the broker's death.")
    ] = True,
    sync: Annotated[
        float,
        typer.Option(help="Seconds of the journal that a power cut may lose; 0: none, and slower.", min=0),
    ] = 1.0,
    store: Annotated[
        str,
        typer.Option(
            help="Where edges with `checkpoint: disk` have their copies, and tensors go for which memory has "
            "no room: disk (this machine's) or mooncake (other hosts' memory, see docs/mooncake.md).",
            callback=_store,
        ),
    ] = "disk",
    mooncake_master: Annotated[
        str | None, typer.Option(help="HOST:PORT of Mooncake's master.", envvar="OMNI_MOONCAKE_MASTER")
    ] = None,
    mooncake_metadata: Annotated[
        str | None,
        typer.Option(
            help="Where Mooncake's processes find each other. Default: P2PHANDSHAKE, by themselves."
        ),
    ] = None,
    mooncake_transfer_buffer_size: Annotated[
        int | None,
        typer.Option(
            help="MiB in each process for tensors on their way to and from Mooncake; none may be larger. "
            "Default: 64.",
            min=1,
        ),
    ] = None,
    mooncake_replicas: Annotated[
        int | None, typer.Option(help="On how many hosts each tensor lies. Default: 2.", min=1)
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="A TCP address, like tcp://0.0.0.0:5555, where workers and clients may come in too; beyond "
            "this machine it needs keys. Workers use the port, clients the next one."
        ),
    ] = None,
    data_host: Annotated[
        str | None,
        typer.Option(
            help="This machine's address at which others read tensors made here. Default: where --listen is.",
            envvar="OMNI_DATA_HOST",
        ),
    ] = None,
    keys: Keys = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that HTTP callers must send, as `key` or `name key`. Repeat it for more. Others on "
            f"this machine can read command lines: rather use the variable {API_KEY_VARIABLE} (a line each), "
            "or --api-keys.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="A file of such keys, a line each: `name key`, or just `key`.", dir_okay=False),
    ] = None,
    workers: Annotated[bool, typer.Option(help="Start the stages' workers.")] = True,
    placement: Annotated[
        str,
        typer.Option(
            help="Where workers run: local (this machine) or ray (the nodes of a cluster; needs --listen).",
            callback=_placement,
        ),
    ] = "local",
    ray_address: Annotated[
        str, typer.Option(help="The Ray cluster: host:port of its head, or auto for the one on this machine.")
    ] = "auto",
    gateway: Annotated[bool, typer.Option(help="Start the HTTP gateway.")] = True,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.", callback=_level)] = "INFO",
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="Stop when standard input ends.", hidden=True)
    ] = False,
    **gateway_settings: Any,
) -> None:
    """Start a broker, its HTTP gateway and its pipelines' workers.

    It runs until Ctrl-C, SIGTERM or `omni-broker stop`.
    """
    from adapters.process import leave_with_stdin
    from adapters.room import NoRoom, check_room
    from broker.address import (
        AddressError,
        is_loopback,
        make_run_dir,
        make_state_dir,
        run_dir,
        state_dir,
    )
    from broker.commands.stores import check_transports, store_address
    from broker.gateway.keys import ApiKeysError
    from broker.gateway.settings import Settings as GatewaySettings
    from broker.gateway.settings import SettingsError
    from broker.supervisor import AlreadyRunning, Settings, running_pid, supervise
    from pipelines.catalog import DEFAULT_PIPELINE
    from pipelines.checks import check_local_devices
    from pipelines.devices import gpu_count
    from pipelines.errors import PipelineError
    from pipelines.loader import load_all

    if stop_with_stdin:
        leave_with_stdin()
    sys.stderr = Enduring(sys.stderr)
    try:
        use_keys(keys)
        doors.check_listen(listen)
        doors.use_data_host(data_host, listen)
        if placement == "ray":
            doors.check_ray(listen)
        where_kept = store_address(
            store,
            mooncake_master,
            metadata=mooncake_metadata,
            buffer_mib=mooncake_transfer_buffer_size,
            replicas=mooncake_replicas,
        )
        settings = Settings(
            pipelines=[
                loaded.with_checkpoint(checkpoint) if checkpoint else loaded  # type: ignore[arg-type]
                for loaded in load_all(
                    pipeline or [DEFAULT_PIPELINE], stage or [], model or [], teacache=enable_teacache
                )
            ],
            host=host,
            port=port,
            workers=workers,
            gateway=gateway,
            gateway_options=GatewaySettings(
                **{name: value for name, value in gateway_settings.items() if value is not None}
            ).command_line(),
            api_keys=doors.api_keys(api_key or [], api_keys),
            listen=listen,
            placement=placement,  # type: ignore[arg-type]
            ray_address=ray_address,
            run_dir=make_run_dir(run_dir()),
            state_dir=make_state_dir(state_dir()) if journal else None,
            sync_s=sync,
            store=where_kept,
            log_level=log_level,
        )
        check_transports(settings.pipelines, where_kept)
        check_room()
        if workers and placement == "local":
            for loaded in settings.pipelines:
                check_local_devices(loaded, gpu_count())
        if running_pid(settings.run_dir) is None:  # else that is what is wrong
            doors.check_free(host if gateway else "", port, listen)
    except (PipelineError, AddressError, NoRoom, ApiKeysError, SettingsError) as error:
        say(str(error))
        raise typer.Exit(USAGE) from None
    if gateway and not settings.api_keys and not is_loopback(host):
        say(
            f"warning: {host} can be reached from other machines, and there is no API key (--api-keys): "
            "anybody may ask"
        )
    try:
        code = supervise(settings)
    except AlreadyRunning as error:
        say(
            f"one is running already here (process {error.pid}, folder {error.folder}); end it with "
            "`omni-broker stop`, or give this one folders of its own in OMNI_RUN_DIR and OMNI_STATE_DIR"
        )
        raise typer.Exit(USAGE) from None
    raise typer.Exit(code)
