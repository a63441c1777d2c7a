"""Folders of files that outlive the server's process: one for each request, whose first line is what was asked.

Files have mode 0600 in a folder of mode 0700, and go after `ttl` seconds without a write. Writes are not flushed to
the disk: they outlive the process, not a loss of power. A line that a crash has torn is left out.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from quire.types.errors import ConfigError
from quire.utils.log import get_logger

logger = get_logger(__name__)

_UNFINISHED = ".tmp"
_GRAIN = 0.1  # seconds by which the times of files may be off


def check_folder(folder: Path) -> None:
    """ConfigError for a folder that others may look into: prompts and answers are to be their owner's alone."""
    mode = stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0o700
    if mode & 0o077:
        raise ConfigError(
            f"journal is {str(folder)!r}, whose mode is {mode:04o}, but others may not look into it; run"
            f" `chmod 700 {folder}`, or name a folder that does not exist yet"
        )


@contextmanager
def held_folder(journal: str | None) -> Iterator[None]:
    """Keep other servers from a journal: they would go on with the same requests. ConfigError if one has it."""
    if journal is None:
        yield
        return
    folder, file = Path(journal).expanduser(), None
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False
    except OSError as error:  # a file system without locks, or no folder can be made: the first write says so
        logger.warning("the journal %s is not locked: %s", folder, error)
        is_free = True
    try:
        if not is_free:
            raise ConfigError(
                f"journal is {str(folder)!r}, which another server uses; stop that one, or name another folder"
            )
        yield
    finally:
        if file is not None:
            os.close(file)


def ignore_failure() -> None:
    """Nobody counts."""


class JournalFolder:
    """Never raises: what cannot be written is served without it, with a log line, and `on_failure` is called."""

    def __init__(
        self, folder: Path, suffix: str, ttl: float, on_failure: Callable[[], None] = ignore_failure
    ) -> None:
        """`suffix` tells the files of one kind from others in the folder."""
        self._folder = folder
        self._suffix = suffix
        self._ttl = ttl
        self._on_failure = on_failure

    def open(self, name: str, line: bytes) -> None:
        self._write(name, line, os.O_CREAT | os.O_TRUNC)

    def append(self, name: str, line: bytes) -> None:
        """Add a line to a file that was opened; nothing if it is gone."""
        self._write(name, line, os.O_APPEND)

    def writer(self, name: str) -> Callable[[msgspec.Struct], None] | None:
        """What appends lines to a file; None where nothing is kept."""
        return lambda line: self.append(name, msgspec.json.encode(line))

    def finish(self, name: str, line: bytes) -> None:
        """Let a last line stand in place of all but the first, in a file that was opened."""
        path = self._path(name)
        if not path.exists():
            return
        whole = path.with_name(path.name + _UNFINISHED)
        try:
            with path.open("rb") as file:
                first = file.readline()
            _write(whole, first + line + b"\n", os.O_CREAT | os.O_TRUNC)
            whole.replace(path)
        except OSError as error:  # the next process makes the end of what there is
            whole.unlink(missing_ok=True)
            self._failed(name, error)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def expire_later(self, name: str) -> None:
        """Delete a file when it has been left alone for the time to live, give or take the clock's grain."""
        if math.isfinite(self._ttl):
            asyncio.get_running_loop().call_later(self._ttl + _GRAIN, self._expire, name)

    def lines(self, name: str) -> list[bytes]:
        """The whole lines of a file; none if it is not there."""
        try:
            return _lines(self._path(name))
        except OSError:
            return []

    def read(self) -> Iterator[tuple[Path, list[bytes]]]:
        """The files that the process before has left, oldest first, and their lines. Expired ones are deleted.

        A torn line is cut off, so that what is appended later does not become a part of it.
        """
        if not self._folder.is_dir():
            return
        for path in self._folder.glob(f"*{self._suffix}{_UNFINISHED}"):
            path.unlink(missing_ok=True)
        for path in sorted(self._folder.glob(f"*{self._suffix}"), key=_time):
            try:
                if _age(path) > self._ttl:
                    path.unlink()
                    continue
                lines = _lines(path)
                whole = sum(len(line) + 1 for line in lines)
                if whole < path.stat().st_size:
                    os.truncate(path, whole)
                yield path, lines
            except OSError as error:
                logger.warning("%s in the journal cannot be used: %s", path.name, error)

    def _expire(self, name: str) -> None:
        path = self._path(name)
        if path.exists() and _age(path) >= self._ttl:
            self.delete(name)

    def _path(self, name: str) -> Path:
        """Clients may choose ids, so that they are no names of files."""
        return Path(self._place(name))

    def _place(self, name: str) -> str:
        """The path as text: every line needs it, and to make a Path takes longer than to write a line."""
        return os.path.join(self._folder, hashlib.sha256(name.encode()).hexdigest()[:32] + self._suffix)

    def _write(self, name: str, line: bytes, flags: int) -> None:
        try:
            if flags & os.O_CREAT:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(self._place(name), line + b"\n", flags)
        except OSError as error:
            if not flags & os.O_CREAT and isinstance(error, FileNotFoundError):
                return  # deleted, expired, or it could not be written before
            with suppress(OSError):  # a part of a record is of no use
                self.delete(name)
            self._failed(name, error)

    def _failed(self, name: str, error: OSError) -> None:
        self._on_failure()
        logger.error("%s is served without the journal: %s", name, error)


class NoFolder(JournalFolder):
    """Everything ends with the process."""

    def __init__(self) -> None:
        super().__init__(Path(), "", math.inf)

    def open(self, name: str, line: bytes) -> None:
        return None

    def append(self, name: str, line: bytes) -> None:
        return None

    def writer(self, name: str) -> Callable[[msgspec.Struct], None] | None:
        return None

    def finish(self, name: str, line: bytes) -> None:
        return None

    def delete(self, name: str) -> None:
        return None

    def expire_later(self, name: str) -> None:
        return None

    def lines(self, name: str) -> list[bytes]:
        return []

    def read(self) -> Iterator[tuple[Path, list[bytes]]]:
        return iter(())


def _time(path: Path) -> float:
    """When it was written; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _age(path: Path) -> float:
    """Seconds since it was written."""
    return time.time() - path.stat().st_mtime


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]  # what follows the last line break is torn


def _write(path: Path | str, content: bytes, flags: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
    finally:
        os.close(file)
