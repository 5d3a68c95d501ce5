"""The folder of models that were pulled: complete and as they were made, or not there.

A model is built in a folder of its own, described by a manifest, flushed to the disk and then renamed to its
place. Whoever is killed on the way leaves only a build folder, which the next pull of the model removes; a
lock file per model keeps two processes from doing the work twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pipelines.catalog import Model

MANIFEST = "manifest.json"
FORMAT = 1  #: changes when converters change what they write, so that old caches are made anew


def cache_dir() -> Path:
    """``OMNI_CACHE``, else ``omni-broker`` in ``XDG_CACHE_HOME`` or ~/.cache."""
    if chosen := os.environ.get("OMNI_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "omni-broker"


class File(msgspec.Struct, frozen=True):
    """One file of a cached model."""

    path: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a complete cache folder holds, and what it was made from."""

    name: str
    version: str
    source_sha256: str
    format: int
    files: list[File]


class Entry:
    """One model's place in the cache."""

    def __init__(self, model: Model, root: Path | None = None) -> None:
        self.model = model
        self._models = (root or cache_dir()) / "models"
        self.path = self._models / f"{model.name}-{model.version}"

    def intact(self, *, hashes: bool = False) -> bool:
        """Whether the model is there as it was made: every file with its size, with ``hashes`` its bytes."""
        try:
            manifest = msgspec.json.decode((self.path / MANIFEST).read_bytes(), type=Manifest)
            return self._made_from(manifest) and all(
                (self.path / file.path).stat().st_size == file.size
                and (not hashes or sha256(self.path / file.path) == file.sha256)
                for file in manifest.files
            )
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return False

    def _made_from(self, manifest: Manifest) -> bool:
        return (manifest.source_sha256, manifest.format) == (self.model.sha256, FORMAT)

    def size(self) -> int:
        """Bytes on the disk."""
        return bytes_in(self.path)

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Excludes other processes and threads from building this model; ``waiting``: somebody else does."""
        self._models.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._models / f".{self.model.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def build(self) -> Iterator[Path]:
        """A folder to build in, on the cache's file system; gone afterwards. Only under :meth:`lock`."""
        prefix = f".build-{self.model.name}-"
        for dead in self._models.glob(f"{prefix}*"):
            shutil.rmtree(dead, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._models))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, made: Path, build: Path) -> None:
        """Puts a finished folder in the model's place at once. Only under :meth:`lock`."""
        files = [
            File(str(path.relative_to(made)), path.stat().st_size, sha256(path))
            for path in sorted(made.rglob("*"))
            if path.is_file()
        ]
        manifest = Manifest(self.model.name, self.model.version, self.model.sha256, FORMAT, files)
        (made / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in [*made.rglob("*"), made]:
            _flush(path)
        if self.path.exists():
            self.path.rename(build / "broken")
        made.rename(self.path)
        _flush(self._models)


def bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder, which others may write to, move and remove meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def sha256(path: Path) -> str:
    """A file's SHA-256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
