"""The journal holds whole batches or nothing of them, whatever happens to the process or the file."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from adapters.handle import Chunk
from broker.core.records import Batch, ClientMet, Finished, Kept, Leased, OfRequest, Opened
from broker.estate import Estate
from broker.journal import Journal, Meta
from broker.protocol import Submit
from tests.core.driver import line

META = Meta(run="0123456789abcdef", boot=1, ahead=0.0, host="here")


def batch(request: int, *records: OfRequest) -> Batch:
    made = Batch()
    made.requests[request] = list(records)
    return made


def kept(seq: int, size: int = 100) -> Kept:
    return Kept(0, Chunk(seq, False, msgspec.Raw(msgspec.msgpack.encode(bytes(size)))))


def written(path: Path, requests: int = 3) -> Journal:
    """A journal with some requests of a few records each."""
    journal = Journal(path)
    journal.begin(META)
    for request in range(1, requests + 1):
        journal.write(batch(request, Leased(0, 1, b"w1"), kept(0)))
        journal.write(batch(request, kept(1), Finished(0)))
    return journal


def requests_in(path: Path) -> dict[int, list[str]]:
    """Request -> the names of its records, in order."""
    saved = Journal(path).take_saved()
    found: dict[int, list[str]] = {}
    for request, record in saved.records if saved is not None else ():
        found.setdefault(request, []).append(type(record).__name__)
    return found


WHOLE = ["Leased", "Kept", "Kept", "Finished"]


def test_what_was_written_is_there_without_a_proper_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = written(path)
    gone = Batch()
    gone.dropped.add(2)
    gone.peers[b"c1"] = ClientMet("api", "")
    journal.write(gone)
    assert requests_in(path) == {1: WHOLE, 3: WHOLE}
    saved = Journal(path).take_saved()
    assert saved is not None
    assert saved.peers == {b"c1": ClientMet("api", "")}
    assert saved.meta == META


def test_a_request_that_is_dropped_and_written_in_one_batch_has_only_the_new(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = written(path, 1)
    again = batch(1, Leased(0, 2, b"w2"))
    again.dropped.add(1)
    journal.write(again)
    assert requests_in(path) == {1: ["Leased"]}


def test_an_empty_journal_leaves_no_file_and_a_full_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = written(path, 1)
    assert not journal.close()
    journal = Journal(path)
    gone = Batch()
    gone.dropped.add(1)
    journal.write(gone)
    assert journal.close()
    assert list(tmp_path.iterdir()) == []


def rows_in(path: Path) -> int:
    """How many batches are kept."""
    with sqlite3.connect(path) as database:
        count: int = database.execute("SELECT count(*) FROM log").fetchone()[0]
    database.close()
    return count


def test_what_is_over_does_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.begin(META)
    for request in range(1, 3001):
        made = batch(request, Leased(0, 1, b"w1"), kept(0))
        made.dropped.add(request - 3)
        journal.write(made)
    assert rows_in(path) < 600
    assert list(requests_in(path)) == [2998, 2999, 3000]


def test_a_request_that_stays_open_does_not_keep_all_that_came_after_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.begin(META)
    journal.write(batch(1, Leased(0, 1, b"w1")))
    for request in range(2, 4001):
        made = batch(request, kept(0, 10_000))
        if request % 1000 == 0:
            made.requests[1] = [kept(request // 1000)]
        made.dropped.add(request - 1 if request > 2 else 0)
        journal.write(made)
    assert rows_in(path) < 2500
    assert requests_in(path) == {1: ["Leased", "Kept", "Kept", "Kept", "Kept"], 4000: ["Kept"]}
    saved = Journal(path).take_saved()
    assert saved is not None
    assert [r.chunk.seq for n, r in saved.records if n == 1 and isinstance(r, Kept)] == [1, 2, 3, 4]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def be_something_else(path: Path) -> None:
    path.write_bytes(b"once upon a time " * 1000)


def be_of_another_release(path: Path) -> None:
    with sqlite3.connect(path) as database:
        value = msgspec.msgpack.encode({**msgspec.structs.asdict(META), "format": 99})
        database.execute("UPDATE meta SET value = ?", (value,))
    database.close()


def hold_nonsense(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE log SET batch = x'c1ff'")
    database.close()


@pytest.mark.parametrize("damage", [cut, zero, be_something_else, be_of_another_release, hold_nonsense])
def test_a_broken_journal_is_put_aside_and_the_broker_starts(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.db"
    written(path, 50).sync()
    Journal(path).close()
    damage(path)
    journal = Journal(path)
    assert journal.take_saved() is None
    assert "requests in flight are lost" in caplog.text
    assert [file for file in tmp_path.iterdir() if ".bad-" in file.name]
    journal.begin(META)
    journal.write(batch(1, *[kept(0)]))
    assert requests_in(path) == {1: ["Kept"]}


def test_a_full_disk_is_an_error_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = written(path)
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.Error, match="full"):
        journal.write(batch(9, kept(0, 1_000_000)))
    assert requests_in(path) == dict.fromkeys((1, 2, 3), WHOLE)


def test_a_broker_that_starts_on_a_full_disk_goes_on_without_a_journal(
    leaves_nothing: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(journal: Journal, meta: Meta) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    state = leaves_nothing / "state"
    request = Opened(Submit(1, "line", ["out"], {}, name="a-request", stored=True), b"", 0.0, 1)
    before = Journal(state / "journal.db")
    before.begin(META)
    before.write(batch(1, request))
    before.close()
    monkeypatch.setattr(Journal, "begin", begin)
    estate = Estate([line("a")], state)
    assert "can't be written" in caplog.text
    assert list(estate.core.board.names) == ["a-request"], "what was open goes on"
    estate.commit()
    estate.close()


WRITER = """
import sys
from pathlib import Path
from tests.journal.test_journal import META, batch, kept
from broker.core.records import Batch, Finished, Leased
from broker.journal import Journal
journal = Journal(Path(sys.argv[1]), float(sys.argv[2]))
journal.begin(META)
request = int(sys.argv[3])
while True:
    request += 1
    journal.write(batch(request, Leased(0, 1, b"w1"), kept(0, 5000), kept(1, 5000), Finished(0)))
    print(request, flush=True)
    if request % 7 == 0:
        journal.sync()
    if request % 3 == 0:
        gone = Batch()
        gone.dropped.add(request - 2)
        journal.write(gone)
"""


@pytest.mark.parametrize("sync_s", [0.0, 1.0])
def test_a_writer_killed_at_any_moment_leaves_whole_batches(tmp_path: Path, sync_s: float) -> None:
    path = tmp_path / "journal.db"
    rng = random.Random(7)
    last = 0
    for _ in range(8):
        command = [sys.executable, "-c", WRITER, str(path), str(sync_s), str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(1, 60)):
                last = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            told = process.stdout.read().split()
            last = int(told[-1]) if told else last
        found = requests_in(path)
        assert set(map(tuple, found.values())) == {("Leased", "Kept", "Kept", "Finished")}
        assert last in found, "what somebody was told is missing"
        last = max(found)
