"""Tensors in Mooncake: what other processes find there, whoever dies, and what it does when it can't."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from adapters.mooncake_broom import Broom
from adapters.mooncake_client import LATER, OK, Address, Connection
from adapters.store import open_store
from scripts.ports import free_port
from tests.adapters.moon import MEMORY_MIB, Moon, Peer, PeerError, moon, need, peering
from tests.leftovers import until

Peers = Callable[..., Peer]

NAME, OTHER = "speech-7f3a90c2", "speech-0badcafe"
MIB = 1 << 20
SEED = 11


@pytest.fixture(scope="module")
def quiet() -> Iterator[Moon]:
    """A Mooncake on two hosts to which nothing happens; tests leave it empty."""
    with moon(2) as made:
        yield made


@pytest.fixture
def peers() -> Iterator[Peers]:
    with peering() as make:
        yield make


@pytest.fixture(scope="module")
def two(quiet: Moon) -> Iterator[tuple[Peer, Peer]]:
    with peering() as make:
        yield make(quiet), make(quiet)


@pytest.fixture
def one(two: tuple[Peer, Peer]) -> Iterator[Peer]:
    """The first of two; what they put is removed."""
    yield two[0]
    two[0].sweep()


@pytest.fixture
def another(two: tuple[Peer, Peer]) -> Peer:
    return two[1]


@pytest.mark.parametrize("size", [0, 1, 100_000, 9 * MIB])
def test_another_process_reads_what_one_has_put(size: int, one: Peer, another: Peer) -> None:
    place = one.put(NAME, SEED, size)
    assert re.fullmatch(rf"{NAME}/mc[0-9a-f]{{30}}", place)
    assert another.read(place, SEED, size)
    assert one.has(place)


def test_it_outlives_the_process_that_has_put_it(quiet: Moon, one: Peer, peers: Peers) -> None:
    other = peers(quiet)
    place = other.put(NAME, SEED, MIB)
    other.kill()
    assert one.read(place, SEED, MIB)


def test_a_chunk_of_an_edge_over_mooncake_arrives_whole(one: Peer, another: Peer) -> None:
    assert another.receive(one.send(NAME)) == ["mooncake"] * 3


@pytest.mark.parametrize(
    ("kept", "swept"), [((), (False, False)), ((NAME,), (True, False)), ((NAME, OTHER), (True, True))]
)
def test_a_sweep_takes_all_requests_but_these(
    kept: tuple[str, ...], swept: tuple[bool, bool], one: Peer
) -> None:
    places = [one.put(name, SEED, 100) for name in (NAME, OTHER)]
    one.sweep(*kept)
    assert [one.has(place) for place in places] == list(swept)


def test_what_is_removed_is_gone_and_nothing_else(quiet: Moon, one: Peer, peers: Peers) -> None:
    neighbour = peers(quiet, space="neighbour")  # another broker's
    theirs = neighbour.put(NAME, SEED, 100)
    first, second, other = one.put(NAME, 1, 100), one.put(NAME, 2, 100), one.put(OTHER, 3, 100)
    assert one.unlink(first)
    until(lambda: not one.has(first), "a tensor to go")
    assert one.has(second)
    one.discard(NAME)
    until(lambda: not one.has(second), "a request's tensors to go")
    one.sweep(OTHER)
    assert one.has(other)
    assert neighbour.has(theirs)
    neighbour.sweep()
    assert not neighbour.has(theirs)


def test_a_removal_waits_for_a_master_that_does_not_answer(peers: Peers) -> None:
    with moon(1) as made:
        peer = peers(made, replicas=1)
        place = peer.put(NAME, SEED, 100)
        made.master.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert peer.unlink(place)
        assert time.monotonic() - began < 30, "it must not hold up an event loop"
        made.master.send_signal(signal.SIGCONT)
        until(lambda: not peer.has(place), "a tensor to go")


class SlowMaster:
    """In the place of a connection: its master takes its time, and then says ``code``."""

    def __init__(self, code: int = OK) -> None:
        self.code = code
        self.calls = 0
        self.begun, self.answer = threading.Event(), threading.Event()

    def call(self, work: object) -> int:
        self.calls += 1
        self.begun.set()
        assert self.answer.wait(60)
        return self.code


def test_what_is_to_be_removed_again_while_it_is_being_removed_is() -> None:
    """A request's end removes what is there; what a cancelled task has put since goes when it has left."""
    master = SlowMaster()
    broom = Broom(cast(Connection, master))
    broom.remove_matching("^omni/request-1/")
    assert master.begun.wait(60)
    broom.remove_matching("^omni/request-1/")
    master.answer.set()
    until(lambda: not broom._due, "the removals")
    assert master.calls == 2
    broom.close()


def test_a_removal_that_is_forgotten_while_it_is_tried_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.mooncake_broom.MOST", 1)
    master = SlowMaster(LATER[0])
    broom = Broom(cast(Connection, master))
    broom.remove("forgotten")
    assert master.begun.wait(60)
    broom.remove("later")
    master.answer.set()
    until(lambda: master.calls > 1, "the other one's try")
    master.code = OK
    until(lambda: not broom._due, "its removal")
    broom.close()


@pytest.mark.parametrize("size", [99, 101])
def test_another_size_than_was_put_is_an_error(size: int, one: Peer) -> None:
    place = one.put(NAME, SEED, 100)
    with pytest.raises(PeerError, match="BadHandle"):
        one.read(place, SEED, size)


@pytest.mark.parametrize(
    "place",
    [f"{NAME}/mc{'0' * 30}", f"{NAME}/{'0' * 32}", "../../etc/passwd", f"{NAME}/mc{'0' * 29}*", ""],
)
def test_places_from_messages_that_lead_nowhere_are_errors(place: str, one: Peer) -> None:
    with pytest.raises(PeerError, match="BadHandle"):
        one.read(place, SEED, 100)
    assert not one.has(place)


@pytest.mark.parametrize("name", ["", "short", "a/b/c/d/e", "(.*)(.*)", "x" * 65])
def test_a_name_that_is_none_neither_puts_nor_removes(name: str, one: Peer) -> None:
    for method, *arguments in (("put", SEED, 9), ("discard",)):
        with pytest.raises(PeerError, match="ValueError"):
            getattr(one, method)(name, *arguments)


def test_full_memory_is_an_error_that_names_the_cure(one: Peer) -> None:
    for _ in range(MEMORY_MIB // 8 - 1):
        one.put(NAME, SEED, 8 * MIB)
    with pytest.raises(PeerError, match=r"ArenaFull.*no room .* -200.*global_segment_size"):
        one.put(NAME, SEED, 8 * MIB)
    one.sweep()
    assert one.read(one.put(NAME, SEED, 8 * MIB), SEED, 8 * MIB)


def test_the_transfer_buffer_bounds_what_one_tensor_may_take(quiet: Moon, peers: Peers) -> None:
    small = peers(quiet, buffer_mib=1)
    with pytest.raises(PeerError, match=r"ArenaFull.*1 MiB; see --mooncake-transfer-buffer-size"):
        small.put(NAME, SEED, 2 * MIB)
    small.unlink(small.put(NAME, SEED, MIB // 2))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tensor_lies_on_as_many_hosts_as_it_should(replicas: int, quiet: Moon, peers: Peers) -> None:
    peer = peers(quiet, replicas=replicas)
    place = peer.put(NAME, SEED, 100)
    assert peer.hosts(place) == replicas
    assert peer.said() == []
    peer.sweep()


def test_fewer_hosts_than_it_should_lie_on_are_told(quiet: Moon, peers: Peers) -> None:
    peer = peers(quiet, replicas=3)
    peer.put(NAME, SEED, 100)
    peer.put(NAME, SEED, 100)
    (line,) = peer.said()
    assert "lies on 2 of 3 hosts" in line
    peer.sweep()


def test_a_metadata_server_is_used_where_one_is_named(peers: Peers) -> None:
    with moon(1, metadata=True) as made:
        peer = peers(made, replicas=1, metadata=made.metadata, patience_s=0.5)
        assert peer.read(peer.put(NAME, SEED, MIB), SEED, MIB)
        lost = peers(made, metadata=f"http://127.0.0.1:{free_port()}/metadata", patience_s=0.5)
        with pytest.raises(PeerError, match="Unreachable"):
            lost.put(NAME, SEED, MIB)


def test_a_host_that_dies_takes_along_only_what_lies_on_it_alone(peers: Peers) -> None:
    """Nor does it hinder what is put and read before the master has noticed."""
    with moon(2, client_ttl_s=5) as made:
        peer, other, careless = peers(made), peers(made), peers(made, replicas=1)
        places = [peer.put(NAME, seed, MIB) for seed in range(6)]
        single = [careless.put(NAME, seed, 1000) for seed in range(24)]
        assert other.read(places[0], 0, MIB)
        made.memory[0].kill()
        for seed, place in enumerate(places):
            assert other.read(place, seed, MIB)
        assert other.read(peer.put(NAME, 7, MIB), 7, MIB)
        assert 0 < len(lost(other, single)) < len(single)


def test_without_a_master_the_cure_is_named_at_once(peers: Peers) -> None:
    need()
    peer = peers(f"127.0.0.1:{free_port()}", patience_s=0.5)
    with pytest.raises(PeerError, match=r"Unreachable.*no Mooncake master answers at .*mooncake_master"):
        peer.put(NAME, SEED, 100)


def test_a_master_that_dies_is_an_error_within_the_limit_and_another_one_is_found(peers: Peers) -> None:
    with moon(1) as made:
        peer = peers(made, replicas=1, patience_s=0.5)
        place = peer.put(NAME, SEED, 100)
        made.master.kill()
        made.master.wait()
        began = time.monotonic()
        with pytest.raises(PeerError, match="Unreachable"):
            peer.read(place, SEED, 100)
        assert time.monotonic() - began < 30
        made.start_master()
        until(lambda: puts(peer), "the new master to know who is there")
        assert not peer.has(place), "it has nothing of the old one's"


def lost(peer: Peer, places: list[str]) -> list[str]:
    """Those that are gone; what is there is whole."""
    gone = []
    for seed, place in enumerate(places):
        try:
            assert peer.read(place, seed, 1000)
        except PeerError as error:
            if error.args[0] != "BadHandle":
                raise
            gone.append(place)
    return gone


def puts(peer: Peer) -> bool:
    """Whether it works again."""
    try:
        peer.put(NAME, SEED, 100)
    except PeerError:
        return False
    return True


def test_an_address_says_all_and_says_what_is_wrong() -> None:
    address = Address("10.0.0.2:50051", space="a-b_c", buffer_mib=7, replicas=3)
    assert Address.parse(str(address)) == address
    assert open_store(str(address)).text == str(address)
    for text in ("mooncake://x", "mooncake://:5", "mooncake://h:99999", "mooncake://h:5?replicas=0"):
        with pytest.raises(ValueError, match=r"HOST:PORT|replicas"):
            Address.parse(text)
    for text in ("mooncake://h:5?space=.*", "mooncake://h:5?buffer_mib=x"):
        with pytest.raises(ValueError, match=r"space|invalid literal"):
            Address.parse(text)
