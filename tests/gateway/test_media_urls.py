"""Links in messages: refused unless the operator allows their host, and never a way into our own network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from broker.gateway.errors import ApiError
from broker.gateway.fetch import Fetcher, is_any, is_public
from broker.gateway.messages import to_payload
from broker.gateway.schemas import (
    AudioLinkPart,
    AudioPart,
    ChatMessage,
    ImageLink,
    ImageLinkPart,
    InputAudio,
    Link,
    VideoLinkPart,
)
from broker.gateway.settings import Settings
from tests.gateway.test_media_in_chats import SENSES
from tests.gateway.test_pictures import NOISE, png
from tests.gateway.test_uploads import VOICE, file

OPEN: Any = {"allow_media_host": ["127.0.0.1"], "allow_media_private": True}
FIELD = "messages[0].content[1]"
LIMIT = 100_000
BODY = bytes(range(256)) * 100


class Names(AbstractResolver):
    """Knows names ending in .test: `one` is 127.0.0.1, `two` 127.0.0.2, and so on."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        numbers = {"one": 1, "two": 2, "media.example": 1}
        number = numbers.get(host.rstrip(".").removesuffix(".test"))
        if number is None:
            raise OSError(f"no host {host}")
        address = f"127.0.0.{number}"
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET,
                "proto": 0,
                "flags": 0,
            }
        ]

    async def close(self) -> None:
        pass


class Site:
    """A web server on all of 127/8 that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0
        self.clip = b""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        match request.path.split("/")[1:]:
            case ["file"]:
                return web.Response(body=BODY)
            case ["clip"]:
                return web.Response(body=self.clip)
            case ["cookie"]:
                response = web.Response(status=302, headers={"Location": "/told"})
                response.set_cookie("a", "b")
                return response
            case ["told"]:
                return web.Response(text=f"{sorted(request.headers)}")
            case ["to", *where]:
                return web.Response(status=302, headers={"Location": "/".join(where)})
            case ["hops", number]:
                here = "/file" if number == "0" else f"/hops/{int(number) - 1}"
                return web.Response(status=307, headers={"Location": here})
            case ["claims"]:
                return web.Response(body=b"x" * (LIMIT + 1))
            case ["endless"]:
                return await self._drip(request, b"x" * 10_000, 0.0)
            case ["slow"]:
                return await self._drip(request, b"x", 0.05)
            case ["gzip"]:
                return web.Response(body=BODY, headers={"Content-Encoding": "gzip"})
            case ["silent"]:
                await asyncio.sleep(30)
        return web.Response(status=404)

    async def _drip(self, request: web.Request, piece: bytes, pause_s: float) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(piece)
            await asyncio.sleep(pause_s)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A running site."""
    site = Site()
    app = web.Application()
    app.router.add_get("/{path:.*}", site.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    site.port = runner.addresses[0][1]
    yield site
    await runner.cleanup()


def fetcher(
    *hosts: str, allows: Callable[[str], bool] = is_any, total_s: float = 60.0, names: Names | None = None
) -> Fetcher:
    return Fetcher(
        hosts=hosts or ("one.test",), max_bytes=LIMIT, allows=allows, total_s=total_s, names=names or Names()
    )


async def refused(fetcher: Fetcher, link: str, status: int = 400, code: str | None = None) -> str:
    with pytest.raises(ApiError) as refusal:
        await fetcher.get(link, FIELD)
    assert refusal.value.status == status
    assert refusal.value.param == FIELD
    assert code is None or refusal.value.code == code
    return refusal.value.message


async def test_a_link_to_an_allowed_host_is_fetched(site: Site) -> None:
    assert await fetcher().get(f"http://one.test:{site.port}/file", FIELD) == BODY
    assert await fetcher("ONE.test.").get(f"http://One.Test.:{site.port}/file", FIELD) == BODY


LINKS = [
    "http://127.0.0.1:{port}/file",
    "http://[::1]:{port}/file",
    "http://[::ffff:127.0.0.1]:{port}/file",
    "http://2130706433:{port}/file",
    "http://0x7f.1:{port}/file",
    "http://0177.0.0.1:{port}/file",
    "http://127.1:{port}/file",
    "http://0:{port}/file",
    "http://localhost:{port}/file",
    "http://169.254.169.254/latest/meta-data",
    "http://one.test:{port}/file",
    "http://one.test@127.0.0.1:{port}/file",
]


@pytest.mark.parametrize("link", LINKS)
async def test_without_allowed_hosts_links_are_refused_and_the_option_is_named(site: Site, link: str) -> None:
    nobody = Fetcher(hosts=[], max_bytes=LIMIT)
    message = await refused(nobody, link.format(port=site.port), code="url_not_allowed")
    assert "--allow-media-host" in message
    assert site.asked == []


@pytest.mark.parametrize("link", [link for link in LINKS if "//one.test:" not in link])
async def test_a_host_that_is_not_allowed_is_not_asked(site: Site, link: str) -> None:
    names = Names()
    await refused(fetcher(names=names), link.format(port=site.port), code="url_not_allowed")
    assert names.asked == [], "not even its name is looked up"
    assert site.asked == []


@pytest.mark.parametrize("link", LINKS)
async def test_an_allowed_host_that_leads_to_this_machine_is_not_asked(site: Site, link: str) -> None:
    """The operator's list may be right today, and the name's owner may point it anywhere tomorrow."""
    hosts = ["one.test", "localhost", "127.0.0.1", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1", "127.1", "0"]
    hosts += ["2130706433", "0x7f.1", "0177.0.0.1", "169.254.169.254"]
    names = None if "localhost" in link or "0x7f" in link else Names()
    strict = Fetcher(hosts=hosts, max_bytes=LIMIT, names=names)
    await refused(strict, link.format(port=site.port))
    assert site.asked == []


@pytest.mark.parametrize(
    "link",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://one.test/x",
        "data:x",
        "",
        "http://",
        "http:///x",
        "http://[",
    ],
)
async def test_what_is_no_http_link_is_refused(link: str) -> None:
    await refused(fetcher(), link)


@pytest.mark.parametrize(
    "where",
    ["http://two.test:{port}/file", "http://127.0.0.1:{port}/file", "file:///etc/passwd", "//two.test/x"],
)
async def test_the_list_is_checked_at_each_redirect(site: Site, where: str) -> None:
    link = f"http://one.test:{site.port}/to/" + where.format(port=site.port)
    await refused(fetcher(), link, code="url_not_allowed")
    assert len(site.asked) == 1


async def test_the_address_is_checked_at_each_redirect(site: Site) -> None:
    """An allowed host sends us on to another allowed host, whose address must not be reached."""
    link = f"http://one.test:{site.port}/to/http://two.test:{site.port}/file"
    assert await fetcher(".test").get(link, FIELD) == BODY
    site.asked.clear()
    message = await refused(fetcher(".test", allows="127.0.0.1".__eq__), link, code="url_not_allowed")
    assert "not public" in message
    assert len(site.asked) == 1


async def test_a_name_that_changes_its_address_is_checked_where_the_connection_goes(site: Site) -> None:
    """The first answer is harmless and the second is not; no answer is trusted for a later connection."""

    class Rebinding(Names):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            return await super().resolve("two.test" if self.asked else "one.test", port, family)

    strict = fetcher(allows="127.0.0.1".__eq__, names=Rebinding())
    await refused(strict, f"http://one.test:{site.port}/hops/1", code="url_not_allowed")
    assert site.asked == ["/hops/1"]


async def test_redirects_end(site: Site) -> None:
    assert await fetcher().get(f"http://one.test:{site.port}/hops/2", FIELD) == BODY
    assert "3 redirects" in await refused(fetcher(), f"http://one.test:{site.port}/hops/3")


@pytest.mark.parametrize("path", ["claims", "endless"])
async def test_a_body_over_the_limit_is_a_413(site: Site, path: str) -> None:
    message = await refused(fetcher(), f"http://one.test:{site.port}/{path}", 413)
    assert str(LIMIT) in message


@pytest.mark.parametrize("path", ["silent", "slow"])
async def test_a_server_that_takes_its_time_is_given_up(site: Site, path: str) -> None:
    message = await refused(fetcher(total_s=0.3), f"http://one.test:{site.port}/{path}")
    assert "0.3 s" in message


async def test_a_compressed_body_is_not_unpacked(site: Site) -> None:
    await refused(fetcher(), f"http://one.test:{site.port}/gzip")


async def test_what_is_not_there_is_a_400(site: Site) -> None:
    assert "404" in await refused(fetcher(), f"http://one.test:{site.port}/nothing")
    await refused(fetcher("none.test"), f"http://none.test:{site.port}/file")
    with socket.create_server(("127.0.0.1", 0)) as full:
        port = full.getsockname()[1]
    await refused(fetcher(), f"http://one.test:{port}/file")


async def test_a_fetch_tells_nothing_about_us(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cookie of an earlier answer, and no proxy of the environment."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    told = (await fetcher().get(f"http://one.test:{site.port}/cookie", FIELD)).decode()
    assert told == "['Accept', 'Accept-Encoding', 'Connection', 'Host', 'User-Agent']"


@pytest.mark.parametrize(
    ("allowed", "host", "covered"),
    [
        ("media.example.test", "media.example.test", True),
        (".example.test", "media.example.test", True),
        (".media.example.test", "media.example.test", True),
        ("example.test", "media.example.test", False),
        (".ample.test", "media.example.test", False),
        ("media.example.test.evil", "media.example.test", False),
        (".", "media.example.test", False),
        ("", "media.example.test", False),
    ],
)
async def test_what_a_list_entry_covers(site: Site, allowed: str, host: str, covered: bool) -> None:
    link = f"http://{host}:{site.port}/file"
    if covered:
        assert await fetcher(allowed).get(link, FIELD) == BODY
    else:
        await refused(fetcher(allowed), link, code="url_not_allowed")


PRIVATE = """0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 192.168.0.1
    192.0.2.1 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:8.8.8.8
    64:ff9b::7f00:1 64:ff9b:1::1 2001:0:7f00:1:: 2001:db8::1 2002:7f00:1:: fc00::1 fd00::1 fe80::1
    fe80::1%eth0 fec0::1 ff02::1"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


async def test_a_fetched_picture_is_seen_as_one_that_was_sent(site: Site) -> None:
    site.clip = png(NOISE)
    for part, what in (
        (ImageLinkPart(ImageLink(f"http://127.0.0.1:{site.port}/clip")), "image"),
        (VideoLinkPart(Link(f"http://127.0.0.1:{site.port}/clip")), "video"),
    ):
        message = ChatMessage("user", [part])
        with pytest.raises(ApiError, match="--allow-media-host"):
            await to_payload([message], SENSES, Settings())
        with pytest.raises(ApiError, match="not public"):
            await to_payload([message], SENSES, Settings(allow_media_host=["127.0.0.1"]))
        assert site.asked == []
        small: Any = {"max_image_mb": 0.0001, "max_video_mb": 0.0001}
        with pytest.raises(ApiError, match="larger than 104 bytes") as refused:
            await to_payload([message], SENSES, Settings(**OPEN, **small))
        assert (refused.value.status, refused.value.code) == (413, f"{what}_too_large")
        site.asked.clear()
    picture = ImageLinkPart(ImageLink(f"http://127.0.0.1:{site.port}/clip"))
    payload = await to_payload([ChatMessage("user", [picture])], SENSES, Settings(**OPEN))
    np.testing.assert_array_equal(payload["images"][0], NOISE)


async def test_a_fetched_clip_is_heard_as_one_that_was_sent(site: Site) -> None:
    site.clip = await file("wav")
    link = f"http://127.0.0.1:{site.port}/clip"
    for part in (AudioLinkPart(Link(link)), AudioPart(InputAudio(link, "wav"))):
        message = ChatMessage("user", [part])
        with pytest.raises(ApiError, match="--allow-media-host"):
            await to_payload([message], VOICE, Settings())
        with pytest.raises(ApiError, match="not public"):
            await to_payload([message], VOICE, Settings(allow_media_host=["127.0.0.1"]))
        assert site.asked == []
        allowing = Settings(allow_media_host=["127.0.0.1"], allow_media_private=True)
        payload = await to_payload([message], VOICE, allowing)
        assert len(payload["audio"][0]) == 16_000
        site.asked.clear()
