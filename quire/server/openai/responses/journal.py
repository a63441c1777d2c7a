"""ResponseJournal: background responses on disk, so that they outlive the server's process.

A file per response, mode 0600 in a folder of mode 0700: what was asked and by whom, and at the end the response. It
holds a digest of the API key and never the key. A response that had not ended is run again with its id and its seed:
the same tokens, wherever arithmetic does not depend on the batch. Files go after `ttl` seconds. Writes are not
flushed to the disk: they outlive the process, not a loss of power. A line that a crash has torn is left out.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from quire.server.openai.responses.items import Item
from quire.server.openai.responses.protocol import Response
from quire.server.openai.responses.store import StoredResponse
from quire.types.errors import ConfigError
from quire.utils.log import get_logger

logger = get_logger(__name__)

_SUFFIX = ".response"


class JournalEntry(msgspec.Struct, frozen=True):
    response_id: str
    owner: str  # digest of the API key that asked; "" where there are no keys
    key: str | None  # idempotency key
    created: int
    body: dict[str, Any]


class _End(msgspec.Struct, frozen=True):
    response: Response
    context: list[Item]
    input: list[Item]


def check_folder(folder: Path) -> None:
    """ConfigError for a folder that others may look into: prompts and answers are to be their owner's alone."""
    mode = stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0o700
    if mode & 0o077:
        raise ConfigError(
            f"journal is {str(folder)!r}, whose mode is {mode:04o}, but others may not look into it; run"
            f" `chmod 700 {folder}`, or name a folder that does not exist yet"
        )


def ignore_failure() -> None:
    """Nobody counts."""


class ResponseJournal:
    """Never raises: what cannot be written is served without it, with a log line, and `on_failure` is called."""

    def __init__(self, folder: Path, ttl: float, on_failure: Callable[[], None] = ignore_failure) -> None:
        self._folder = folder
        self.ttl = ttl
        self._on_failure = on_failure

    def open(self, entry: JournalEntry) -> None:
        self._write(entry.response_id, msgspec.json.encode(entry), os.O_CREAT | os.O_TRUNC)

    def finish(self, response_id: str, stored: StoredResponse) -> None:
        """A response has ended; it is kept until its time is over."""
        end = _End(stored.response, stored.context, stored.input)
        if self._path(response_id).exists():
            self._write(response_id, msgspec.json.encode(end), os.O_APPEND)

    def expire(self, response_id: str) -> None:
        """Delete a file whose time is over; one that was written since is left."""
        path = self._path(response_id)
        if path.exists() and _age(path) >= self.ttl:
            self.delete(response_id)

    def delete(self, response_id: str) -> None:
        self._path(response_id).unlink(missing_ok=True)

    def read(self) -> list[tuple[JournalEntry, StoredResponse | None]]:
        """What the process before has left, oldest first; None: it had not ended. Expired files are deleted."""
        found: list[tuple[JournalEntry, StoredResponse | None]] = []
        for path in self._folder.glob(f"*{_SUFFIX}") if self._folder.is_dir() else ():
            try:
                if _age(path) > self.ttl:
                    path.unlink()
                    continue
                found.append(_parsed(path.read_bytes()))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("%s in the journal cannot be used: %s", path.name, error)
        return sorted(found, key=lambda pair: pair[0].created)

    def _path(self, response_id: str) -> Path:
        """Clients may choose ids, so that they are no names of files."""
        return self._folder / (hashlib.sha256(response_id.encode()).hexdigest()[:32] + _SUFFIX)

    def _write(self, response_id: str, line: bytes, flags: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._path(response_id), os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
            try:
                left = memoryview(line + b"\n")
                while left:
                    left = left[os.write(file, left) :]
            finally:
                os.close(file)
        except OSError as error:
            if flags & os.O_CREAT:  # half of a request is of no use; half of an end is left out
                with suppress(OSError):
                    self.delete(response_id)
            self._on_failure()
            logger.error("%s is served without the journal: %s", response_id, error)


class NoJournal(ResponseJournal):
    """Responses end with the process."""

    def __init__(self) -> None:
        super().__init__(Path(), math.inf)

    def open(self, entry: JournalEntry) -> None:
        return None

    def finish(self, response_id: str, stored: StoredResponse) -> None:
        return None

    def expire(self, response_id: str) -> None:
        return None

    def delete(self, response_id: str) -> None:
        return None

    def read(self) -> list[tuple[JournalEntry, StoredResponse | None]]:
        return []


def _age(path: Path) -> float:
    """Seconds since it was written."""
    return time.time() - path.stat().st_mtime


def _parsed(content: bytes) -> tuple[JournalEntry, StoredResponse | None]:
    lines = content.split(b"\n")[:-1]  # what follows the last line break is torn
    if not lines:
        raise msgspec.DecodeError("it is empty")
    entry = msgspec.json.decode(lines[0], type=JournalEntry)
    if len(lines) == 1:
        return entry, None
    end = msgspec.json.decode(lines[-1], type=_End)
    return entry, StoredResponse(end.response, end.context, end.input, owner=entry.owner)
