"""``python -P -m broker.gateway``: the gateway process, started by the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import resource
import signal
import sys
from pathlib import Path

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from broker.address import AddressError
from broker.gateway.app import make_app
from broker.gateway.context import Context
from broker.gateway.keys import ApiKeys, ApiKeysError
from broker.gateway.link import BrokerLink
from broker.gateway.metrics import Metrics
from broker.gateway.room import Room
from broker.gateway.settings import Settings, add_options
from broker.gateway.silence import Silence

log = logging.getLogger("gateway")

LEAVE_S = 3.0  #: how long open requests may go on after SIGTERM
MOST_FILES = 65_536
OWN_FILES = 256  #: besides callers' connections


class NoHttp(logging.Filter):
    """Makes one line of what aiohttp says of bytes that are no HTTP request.

    It would show a traceback and the bytes. Anybody may send those, as many as they like, and a key may be in
    them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """See the class. Lets everything through."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg = "what %s sent is no HTTP request"
            record.exc_info = None
        return True


def allow_many_files(callers: int) -> None:
    """Lets this process open as many files as it may: each caller is one, and shells begin with 1024.

    Args:
        callers: How many there shall be at most; says so if that can't be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft > most:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < callers + OWN_FILES:
        log.warning("only %d files may be open (ulimit -Hn): --max-open %d can't be reached", most, callers)


async def serve(host: str, port: int, address: str | None, data_host: str | None, settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code."""
    try:
        link = BrokerLink(address, data_host)
        api_keys = ApiKeys.load(Path(settings.api_keys)) if settings.api_keys else ApiKeys()
    except (AddressError, ApiKeysError) as error:
        log.error("%s", error)
        return 2
    silence = Silence(settings.stall_s)
    app = make_app(Context(link, settings, Metrics(), api_keys, Room(settings.max_decoded_mb)), silence)
    # A compressed body could become a huge one while it comes in; the guard refuses it instead.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=LEAVE_S, auto_decompress=False
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        log.error("can't listen on %s:%d: %s; choose another with --port", host, port, error.strerror)
        await runner.cleanup()
        return 1
    log.info("listening on http://%s:%d", *runner.addresses[0][:2])
    link.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Decoding and encoding need them, and their import takes longer than a first request should.
    preload = asyncio.create_task(asyncio.to_thread(_preload))
    assert runner.server is not None
    looking = asyncio.create_task(silence.end(runner.server))
    await stop.wait()
    looking.cancel()
    await preload
    await runner.cleanup()
    await link.close()
    return 0


def _preload() -> None:
    """One after the other: two threads that import would leave the first callers a third of the time."""
    for name in ("av", "PIL.Image"):
        importlib.import_module(name)


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(prog="broker.gateway", description="The HTTP gateway process.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one")
    parser.add_argument("--address", default=None, help="ipc:///folder or tcp://127.0.0.1:port of the broker")
    parser.add_argument("--data-host", default=None, help="where other machines read what is uploaded here")
    parser.add_argument("--log-level", default="INFO")
    add_options(parser)
    arguments = vars(parser.parse_args())
    logging.basicConfig(level=arguments.pop("log_level").upper(), format="%(message)s")
    logging.getLogger("aiohttp.server").addFilter(NoHttp())
    host, port, address, data = (arguments.pop(n) for n in ("host", "port", "address", "data_host"))
    try:
        settings = Settings(**arguments)
    except ValueError as error:
        parser.error(str(error))
    allow_many_files(settings.max_open)
    sys.exit(uvloop.run(serve(host, port, address, data, settings)))


if __name__ == "__main__":
    main()
