"""ResponseJournal: background responses on disk, so that they outlive the server's process.

A file per response: what was asked and by whom, then a line for each output of the engine (see
generation/record.py), and at the end, instead of those, the response and its events. It holds a digest of the API key
and never the key. A response that had not ended goes on after its last output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.server.generation.record import Line, Record
from quire.server.journal import JournalFolder
from quire.server.openai.responses.items import Item
from quire.server.openai.responses.protocol import Response
from quire.server.openai.responses.store import StoredResponse
from quire.utils.log import get_logger

logger = get_logger(__name__)

SUFFIX = ".response"


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


class ResponseJournal:
    """What responses are in a folder."""

    def __init__(self, folder: JournalFolder) -> None:
        self.folder = folder

    def open(self, entry: JournalEntry) -> None:
        self.folder.open(entry.response_id, msgspec.json.encode(entry))

    def record(self, response_id: str, known: Iterable[Line] = (), *, created: int | None = None) -> Record:
        """The record of a response that was opened or will be; what is added before is not kept."""
        return Record(self.folder.writer(response_id), known, created=created)

    def finish(self, response_id: str, response: Response, events: Sequence[bytes]) -> None:
        """A response has ended; it is kept until its time is over. The events replace what they were made of."""
        end = _EndWithEvents(response, [event.decode() for event in events])
        self.folder.finish(response_id, msgspec.json.encode(end))

    def events(self, response_id: str) -> list[bytes] | None:
        """The events of a response that has ended; None if they are not there."""
        lines = self.folder.lines(response_id)
        try:
            end = msgspec.json.decode(lines[-1] if lines else b"", type=_EndWithEvents)
        except msgspec.MsgspecError:
            return None
        return [event.encode() for event in end.events]

    def owner(self, response_id: str) -> str | None:
        """Whose response it is that the folder has; None if it has none."""
        try:
            return msgspec.json.decode(b"".join(self.folder.lines(response_id)[:1]), type=JournalEntry).owner
        except msgspec.MsgspecError:
            return None

    def read(self) -> list[Journaled]:
        """What the process before has left, oldest first."""
        found: list[Journaled] = []
        for path, lines in self.folder.read():
            try:
                found.append(_parsed(lines))
            except msgspec.MsgspecError as error:
                logger.warning("%s in the journal cannot be used: %s", path.name, error)
        return sorted(found, key=lambda journaled: journaled.entry.created)


def _parsed(lines: list[bytes]) -> Journaled:
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
