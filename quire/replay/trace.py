"""Trace: reads what quire/engine/trace has written of a life of an engine. Imports no torch.

A frame that a crash has torn is the last one, and is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.engine.trace.file import FRAME, MAGIC, PACKED
from quire.engine.trace.records import FORMAT, Header, Record
from quire.types.errors import TraceError

_MOST = 1 << 30  # bytes of a frame; more is not one of ours


def read_frames(path: Path) -> Iterator[Record]:
    """All records of one file, its header first. TraceError for what is no trace; a torn end is left out."""
    decoder = msgspec.msgpack.Decoder(list[Record])
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise TraceError(f"the trace {str(path)!r} cannot be read: {error.strerror}") from error
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise TraceError(f"{str(path)!r} is not a trace; give a file that --trace has written")
    at = len(MAGIC)
    while at + FRAME.size <= len(content):
        length, checksum = FRAME.unpack_from(content, at)
        packed, length = bool(length & PACKED), length & ~PACKED
        at += FRAME.size
        body = content[at : at + length]
        if length > _MOST or len(body) < length or zlib.crc32(body) != checksum:
            return
        at += length
        try:
            yield from decoder.decode(zlib.decompress(body) if packed else body)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{str(path)!r} was written by another version of Quire: {error}") from error


class Trace:
    """A life of an engine, as far as its segments are there."""

    def __init__(self, path: str | Path) -> None:
        """`path` is its newest segment, FILE or FILE.N; older ones lie beside it. TraceError if it cannot be used."""
        self.path = Path(path).expanduser()
        self.header = _header(self.path)
        self._segments = [self.path]
        self.is_whole = self._find_older()

    def records(self) -> Iterator[Record]:
        """All records, oldest first, without headers."""
        for path in self._segments:
            for record in read_frames(path):
                if not isinstance(record, Header):
                    yield record

    def _find_older(self) -> bool:
        """Find the segments before the newest, by what their headers say; whether the first one is there."""
        segments = {
            header.segment: path
            for path in _beside(self.path)
            if (header := _known_header(path)) is not None and header.life == self.header.life
        }
        wanted = self.header.segment - 1
        while wanted in segments:
            self._segments.insert(0, segments[wanted])
            wanted -= 1
        return wanted < 0


def _beside(path: Path) -> list[Path]:
    """Files that may be segments of the same trace: `path` may be FILE.1 already, since a later life is FILE."""
    name, _, number = path.name.rpartition(".")
    names = [path.name, name] if name and number.isdigit() else [path.name]
    return [
        other
        for other in path.parent.iterdir()
        if any(other.name == n or other.name.removeprefix(f"{n}.").isdigit() for n in names)
    ]


def _known_header(path: Path) -> Header | None:
    """None for what cannot be read: a neighbour may be of another version, or no trace."""
    try:
        return _header(path)
    except TraceError:
        return None


def _header(path: Path) -> Header:
    first = next(read_frames(path), None)
    if not isinstance(first, Header):
        raise TraceError(f"{str(path)!r} has no header: its engine died before it wrote one")
    if first.format != FORMAT:
        raise TraceError(f"{str(path)!r} has format {first.format} but this Quire reads {FORMAT}")
    return first
