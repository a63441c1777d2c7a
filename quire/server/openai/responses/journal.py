"""ResponseJournal: background responses on disk, so that they outlive the server's process.

A file per response, mode 0600 in a folder of mode 0700: what was asked and by whom, then a line for each output of
the engine (see record.py), and at the end, instead of those, the response and its events. It holds a digest of the
API key and never the key. A response that had not ended goes on after its last output. Files go after `ttl` seconds.
Writes are not flushed to the disk: they outlive the process, not a loss of power. A line that a crash has torn is
left out, with what follows it.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from quire.server.openai.responses.items import Item
from quire.server.openai.responses.protocol import Response
from quire.server.openai.responses.record import Line, Record
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
    context: list[Item]  # what was said before, in responses that no later process may know
    input: list[Item]


class _End(msgspec.Struct, frozen=True, tag="end"):
    response: Response


class _EndWithEvents(_End, frozen=True, tag="end"):
    """Events are read when they are asked for."""

    events: list[str]  # as they are sent


class Journaled(msgspec.Struct, frozen=True):
    """A response that the process before has left."""

    entry: JournalEntry
    lines: list[Line]
    """What was said so far, of a response that has not ended."""
    stored: StoredResponse | None
    """The response, if it has ended."""


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

    def record(self, response_id: str, known: Iterable[Line] = ()) -> Record:
        """The record of a response that was opened."""
        return Record(lambda line: self._write(response_id, msgspec.json.encode(line), os.O_APPEND), known)

    def finish(self, response_id: str, response: Response, events: Sequence[bytes]) -> None:
        """A response has ended; it is kept until its time is over. The events replace what they were made of."""
        path = self._path(response_id)
        if not path.exists():
            return
        end = _EndWithEvents(response, [event.decode() for event in events])
        try:
            with path.open("rb") as file:
                first = file.readline()
            whole = path.with_suffix(".tmp")
            _write(whole, first + msgspec.json.encode(end) + b"\n", os.O_CREAT | os.O_TRUNC)
            whole.replace(path)
        except OSError as error:  # the next process makes the end of what was recorded
            path.with_suffix(".tmp").unlink(missing_ok=True)
            self._failed(response_id, error)

    def events(self, response_id: str) -> list[bytes] | None:
        """The events of a response that has ended; None if they are not there."""
        try:
            last = self._path(response_id).read_bytes().split(b"\n")[-2]
            end = msgspec.json.decode(last, type=_EndWithEvents)
        except (OSError, IndexError, msgspec.MsgspecError):
            return None
        return [event.encode() for event in end.events]

    def expire(self, response_id: str) -> None:
        """Delete a file whose time is over; one that was written since is left."""
        path = self._path(response_id)
        if path.exists() and _age(path) >= self.ttl:
            self.delete(response_id)

    def delete(self, response_id: str) -> None:
        self._path(response_id).unlink(missing_ok=True)

    def read(self) -> list[Journaled]:
        """What the process before has left, oldest first. Expired files are deleted."""
        found: list[Journaled] = []
        for path in self._folder.glob(f"*{_SUFFIX}") if self._folder.is_dir() else ():
            try:
                if _age(path) > self.ttl:
                    path.unlink()
                    continue
                found.append(_parsed(path.read_bytes()))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("%s in the journal cannot be used: %s", path.name, error)
        return sorted(found, key=lambda journaled: journaled.entry.created)

    def _path(self, response_id: str) -> Path:
        """Clients may choose ids, so that they are no names of files."""
        return self._folder / (hashlib.sha256(response_id.encode()).hexdigest()[:32] + _SUFFIX)

    def _write(self, response_id: str, line: bytes, flags: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(self._path(response_id), line + b"\n", flags)
        except OSError as error:
            if not flags & os.O_CREAT and isinstance(error, FileNotFoundError):
                return  # deleted, expired, or it could not be written before
            with suppress(OSError):  # a part of a record is of no use: events would get other numbers
                self.delete(response_id)
            self._failed(response_id, error)

    def _failed(self, response_id: str, error: OSError) -> None:
        self._on_failure()
        logger.error("%s is served without the journal: %s", response_id, error)


class NoJournal(ResponseJournal):
    """Responses end with the process."""

    def __init__(self) -> None:
        super().__init__(Path(), math.inf)

    def open(self, entry: JournalEntry) -> None:
        return None

    def record(self, response_id: str, known: Iterable[Line] = ()) -> Record:
        return Record()

    def finish(self, response_id: str, response: Response, events: Sequence[bytes]) -> None:
        return None

    def events(self, response_id: str) -> list[bytes] | None:
        return None

    def expire(self, response_id: str) -> None:
        return None

    def delete(self, response_id: str) -> None:
        return None

    def read(self) -> list[Journaled]:
        return []


def _age(path: Path) -> float:
    """Seconds since it was written."""
    return time.time() - path.stat().st_mtime


def _write(path: Path, content: bytes, flags: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
    finally:
        os.close(file)


def _parsed(content: bytes) -> Journaled:
    lines = content.split(b"\n")[:-1]  # what follows the last line break is torn
    if not lines:
        raise msgspec.DecodeError("it is empty")
    entry = msgspec.json.decode(lines[0], type=JournalEntry)
    said: list[Line] = []
    for line in lines[1:]:
        try:
            found = _LINES.decode(line)
        except msgspec.MsgspecError as error:
            logger.warning("the journal of %s ends with a line that cannot be read: %s", entry.response_id, error)
            break
        if isinstance(found, _End):
            stored = StoredResponse(found.response, entry.context, entry.input, owner=entry.owner)
            return Journaled(entry, [], stored)
        said.append(found)
    return Journaled(entry, said, None)


_LINES: msgspec.json.Decoder[Line | _End] = msgspec.json.Decoder(Line | _End)
