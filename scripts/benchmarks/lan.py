"""Machines that are none: network namespaces on a bridge, each with an address and a link that can be cut.

Needs root and `ip` (iproute2). The bridge has a namespace of its own; a last leg of it leads to the namespace
that we are in, so that callers here reach all hosts. Names and addresses are random: several networks get on
with each other, and with the machine's own.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
from functools import cache
from typing import Any, NamedTuple, Self


class LanError(RuntimeError):
    """A network that can't be made; the message has what `ip` said."""


class Traffic(NamedTuple):
    """What has gone through a host's link, frames and all."""

    received: int
    sent: int

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.received + self.sent


@cache
def missing() -> str:
    """Why there can be no such network here; "" where there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is missing"
    try:
        Lan(1).close()
    except LanError as error:
        return f"this machine makes no network namespaces: {error}"
    return ""


class Lan:
    """So many hosts on one bridge. :meth:`close` removes all of it, with links that still carry traffic.

    Args:
        hosts: How many; their numbers begin at 0.
    """

    def __init__(self, hosts: int) -> None:
        self._tag = secrets.token_hex(3)
        self._bridge = f"omni-{self._tag}-b"
        self._spaces = [f"omni-{self._tag}-{number}" for number in range(hosts)]
        self._ours = f"om-{self._tag}"
        network = _free_network()
        self.addresses = [str(network[number + 1]) for number in range(hosts)]
        self.here = str(network[-2])  #: ours
        try:
            self._make(network.prefixlen)
        except LanError:
            self.close()
            raise

    def _make(self, bits: int) -> None:
        _ip("".join(f"netns add {space}\n" for space in (self._bridge, *self._spaces)))
        _ip("link add bridge type bridge stp_state 0\nlink set bridge up\nlink set lo up\n", self._bridge)
        for number, (space, address) in enumerate(zip(self._spaces, self.addresses, strict=True)):
            _ip(f"link add p{number} type veth peer name eth0 netns {space}\n", self._bridge)
            _ip(f"link set lo up\naddress add {address}/{bits} dev eth0\nlink set eth0 up\n", space)
            _ip(f"link set p{number} master bridge\nlink set p{number} up\n", self._bridge)
        _ip(f"link add {self._ours} type veth peer name here netns {self._bridge}\n")
        _ip(f"address add {self.here}/{bits} dev {self._ours}\nlink set {self._ours} up\n")
        _ip("link set here master bridge\nlink set here up\n", self._bridge)

    def inside(self, number: int, command: list[str]) -> list[str]:
        """The command line that runs a command on a host, in the process that is started."""
        return ["ip", "netns", "exec", self._spaces[number], *command]

    def cut(self, *numbers: int) -> None:
        """From now on all that these hosts send, and all that is sent to them, vanishes without an error."""
        self._plug(numbers, "nomaster")

    def restore(self, *numbers: int) -> None:
        """Their links work again."""
        self._plug(numbers, "master bridge")

    def _plug(self, numbers: tuple[int, ...], where: str) -> None:
        # A port that is down would be seen by its host, as a cable that is pulled out is.
        _ip("".join(f"link set p{number} {where}\n" for number in numbers), self._bridge)

    def traffic(self, number: int) -> Traffic:
        """What has gone through a host's link so far."""
        command = ["ip", "-n", self._spaces[number], "-s", "-j", "link", "show", "dev", "eth0"]
        (link,) = json.loads(_run(command, ""))
        counts: dict[str, Any] = link["stats64"]
        return Traffic(counts["rx"]["bytes"], counts["tx"]["bytes"])

    def close(self) -> None:
        """Removes everything; namespaces in which processes still run go when those end."""
        if self._ours in (name for _, name in socket.if_nameindex()):
            _ip(f"link delete {self._ours}\n")
        there = _run(["ip", "-j", "netns", "list"], "")
        left = {space["name"] for space in json.loads(there or "[]")} & {self._bridge, *self._spaces}
        _ip("".join(f"netns delete {space}\n" for space in sorted(left)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_network() -> ipaddress.IPv4Network:
    """A private network of 256 addresses that nothing here is routed to by name. Raises LanError."""
    routed = [ipaddress.ip_network(route["dst"]) for route in _routes() if route["dst"] != "default"]
    for _ in range(100):
        network = ipaddress.IPv4Network(f"10.{random.randint(64, 250)}.{random.randint(0, 255)}.0/24")
        if not any(network.overlaps(other) for other in routed):
            return network
    raise LanError("all of 10.0.0.0/8 is in use here")


def _routes() -> list[dict[str, Any]]:
    routes: list[dict[str, Any]] = json.loads(_run(["ip", "-j", "-4", "route", "show"], "") or "[]")
    return routes


def _ip(lines: str, space: str = "") -> None:
    """Runs lines of `ip`, in a namespace if one is named. Raises LanError at the first that fails."""
    _run(["ip", *(("-n", space) if space else ()), "-batch", "-"], lines)


def _run(command: list[str], lines: str) -> str:
    result = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=30)
    if result.returncode:
        raise LanError(result.stderr.strip().replace("\n", "; ") or f"exit code {result.returncode}")
    return result.stdout
