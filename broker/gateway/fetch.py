"""Media by link, from hosts that the operator has named, and from nowhere near this machine.

A link may be a caller's try to reach what only we can reach. So the host is checked at each redirect, and
the address when a connection to it is made: whatever a name led to before, that address is what counts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from broker.gateway.errors import ApiError
from broker.gateway.settings import Settings

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)

_UNICAST = ipaddress.IPv6Network("2000::/3")  #: all public IPv6; mapped IPv4 and NAT64 lie outside
_TUNNELS = (
    ipaddress.IPv6Network("2001::/32"),
    ipaddress.IPv6Network("2002::/16"),
)  #: Teredo and 6to4 hold IPv4


def is_public(address: str) -> bool:
    """Whether a numeric address is one host's in the public internet, and holds no other address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in _UNICAST and ip.is_global and not any(ip in tunnel for tunnel in _TUNNELS)
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def is_any(address: str) -> bool:
    """For operators whose media lie in their own network."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Gets files over HTTP.

    Args:
        hosts: Those that links may name: ``media.example.org`` is that host alone, ``.example.org`` is
            ``example.org`` and all hosts below it. Empty: none, so all links are refused.
        max_bytes: Larger files are refused.
        what: What kind of file it should be ("audio", "image", "video"), for errors' codes.
        allows: Tells whether one may connect to a numeric address.
        total_s: For all hops together, to the last byte.
        names: What looks names up; the system, if absent.
    """

    hosts: Sequence[str]
    max_bytes: int
    what: str = "audio"
    allows: Callable[[str], bool] = is_public
    total_s: float = 10.0
    names: AbstractResolver | None = None

    async def get(self, link: str, field: str) -> bytes:
        """The file at a link.

        Args:
            link: An ``http`` or ``https`` URL.
            field: Its place in the request, for errors.

        Raises ApiError: 400 for a link that is not allowed, or leads to no file; 413 for a file too large.
        """
        if not self.hosts:
            raise ApiError(
                f"{field}: links are not fetched here; send the data, or have the server started with "
                "--allow-media-host HOST",
                field,
                code="url_not_allowed",
            )
        return await _Fetch(self, field).get(link)


def fetcher(settings: Settings, what: str, max_mb: float) -> Fetcher:
    """For links in requests, as the gateway's settings allow them."""
    allows = is_any if settings.allow_media_private else is_public
    return Fetcher(hosts=settings.allow_media_host, max_bytes=int(max_mb * 2**20), what=what, allows=allows)


class _Fetch:
    """One link's way to its file."""

    def __init__(self, rules: Fetcher, field: str) -> None:
        self._rules = rules
        self._field = field
        self._led_astray = False

    async def get(self, link: str) -> bytes:
        try:
            async with asyncio.timeout(self._rules.total_s), self._session() as session:
                return await self._follow(session, link)
        except TimeoutError:
            raise self._failure(f"gave no whole file within {self._rules.total_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError):  # ValueError: no URL at all
            if self._led_astray:
                raise self._failure("leads to an address that is not public", "url_not_allowed") from None
            raise self._failure("could not be fetched") from None

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._rules.names, use_dns_cache=False, force_close=True, socket_factory=self._socket
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small body could become a huge one
            headers={"Accept-Encoding": "identity", "User-Agent": "omni-broker"},
        )

    def _socket(self, where: aiohttp.AddrInfoType) -> socket.socket:
        """Makes the socket for a connection to one address. Raises OSError where none may be made."""
        family, kind, protocol, _, address = where
        if not self._rules.allows(str(address[0])):
            self._led_astray = True
            raise OSError("not a public address")
        return socket.socket(family, kind, protocol)

    async def _follow(self, session: aiohttp.ClientSession, link: str) -> bytes:
        url = URL(link)
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            async with session.get(url, allow_redirects=False) as response:
                if response.status == 200:
                    return await self._read(response)
                if response.status not in _REDIRECTS or "Location" not in response.headers:
                    raise self._failure(f"was answered with {response.status}")
                url = url.join(URL(response.headers["Location"]))
        raise self._failure(f"leads through more than {MAX_REDIRECTS} redirects")

    def _check(self, url: URL) -> None:
        """Raises ApiError unless the URL is one of an allowed host."""
        host = (url.host or "").rstrip(".")
        if url.scheme not in ("http", "https") or not host:
            raise self._failure("is not of http or https", "url_not_allowed")
        if not any(_covers(allowed, host) for allowed in self._rules.hosts):
            raise self._failure(f"leads to {host[:80]!r}, which is not allowed here", "url_not_allowed")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise self._failure("was answered with a compressed body")
        data = bytearray()
        too_large = (response.content_length or 0) > self._rules.max_bytes
        while not too_large and (piece := await response.content.readany()):
            data += piece
            too_large = len(data) > self._rules.max_bytes
        if too_large:
            raise ApiError(
                f"{self._field}: the file at the link is larger than {self._rules.max_bytes} bytes",
                self._field,
                status=413,
                code=f"{self._rules.what}_too_large",
            )
        return bytes(data)

    def _failure(self, why: str, code: str = "url_not_fetched") -> ApiError:
        return ApiError(f"{self._field}: the link {why}", self._field, code=code)


def _covers(allowed: str, host: str) -> bool:
    allowed = allowed.lower().rstrip(".")
    return host == allowed.removeprefix(".") or (allowed.startswith(".") and host.endswith(allowed))
