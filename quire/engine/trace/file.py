"""Trace files: frames of records, each with its length and checksum. Rotating, bounded, readable by their owner only.

A frame that a crash has torn is the last one, and is left out. FILE is the newest segment; FILE.1, FILE.2, ... are
older. Imports no torch.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from quire.engine.trace.records import FORMAT, Header, Record, Took
from quire.types.errors import TraceError
from quire.types.messages import Command

MAGIC = b"quire-trace\n"
NUM_SEGMENTS = 4  # files that together have the size that the user gives
_FRAME = struct.Struct("<II")  # length, with _PACKED if compressed; CRC-32 of what follows
_PACKED = 1 << 31
_MOST = 1 << 30  # bytes of a frame; more is not one of ours


class TraceWriter:
    """One life of an engine, in segments. Raises OSError when the disk does not take it."""

    def __init__(self, path: Path, header: Header, size: int) -> None:
        """`size`: most bytes of all segments together."""
        self._path = path
        self._header = header
        self._segment_size = max(1, size // NUM_SEGMENTS)
        self._encoder = msgspec.msgpack.Encoder()
        self._file = -1
        self._written = 0
        self._open()

    def write(self, records: Sequence[Record]) -> None:
        """Hand records to the system at once: a process that is killed afterwards has not lost them."""
        plain: list[Record] = []
        for record in records:
            plain.append(record)
            if isinstance(record, Took) and isinstance(record.message, Command):
                self._write_frame(plain, pack=True)  # it may hold a vocabulary
                plain = []
        if plain:
            self._write_frame(plain)
        if self._written > self._segment_size:
            self._next_segment()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        _rotate(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._written = os.write(self._file, MAGIC)
        self._write_frame([self._header])

    def _next_segment(self) -> None:
        self.close()
        self._header = msgspec.structs.replace(self._header, segment=self._header.segment + 1)
        self._open()

    def _write_frame(self, records: Sequence[Record], *, pack: bool = False) -> None:
        content = self._encoder.encode(records)
        flags = 0
        if pack:
            content, flags = zlib.compress(content, 1), _PACKED
        frame = memoryview(_FRAME.pack(len(content) | flags, zlib.crc32(content)) + content)
        while frame:
            count = os.write(self._file, frame)
            self._written += count
            frame = frame[count:]


def _rotate(path: Path) -> None:
    """Make room for a new segment under the name; the oldest goes."""
    for number in range(NUM_SEGMENTS - 1, 0, -1):
        older = numbered(path, number - 1)
        if older.exists():
            older.replace(numbered(path, number))


def numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


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
    while at + _FRAME.size <= len(content):
        length, checksum = _FRAME.unpack_from(content, at)
        packed, length = bool(length & _PACKED), length & ~_PACKED
        at += _FRAME.size
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
        """`path` is its newest segment; older ones are looked for beside it. TraceError if it cannot be used."""
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
        wanted = self.header.segment - 1
        for path in sorted(self.path.parent.glob(f"{self.path.name}.*")):
            if wanted < 0:
                break
            number = path.name.removeprefix(self.path.name + ".")
            if number.isdigit():
                header = _header(path)
                if (header.life, header.segment) == (self.header.life, wanted):
                    self._segments.insert(0, path)
                    wanted -= 1
        return wanted < 0


def _header(path: Path) -> Header:
    first = next(read_frames(path), None)
    if not isinstance(first, Header):
        raise TraceError(f"{str(path)!r} has no header: its engine died before it wrote one")
    if first.format != FORMAT:
        raise TraceError(f"{str(path)!r} has format {first.format} but this Quire reads {FORMAT}")
    return first
