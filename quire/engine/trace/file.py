"""Writes trace files: frames of records with their length and checksum. Rotating, bounded, open to their owner only.

FILE is the newest segment; FILE.1, FILE.2, ... are older. quire/replay/trace.py reads them. Imports no torch.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from quire.engine.trace.records import Header, Record, Took
from quire.types.messages import Command

MAGIC = b"quire-trace\n"
NUM_SEGMENTS = 4  # files that together have the size that the user gives
FRAME = struct.Struct("<II")  # length, with PACKED if compressed; CRC-32 of what follows
PACKED = 1 << 31


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

    def write(self, records: Sequence[Record]) -> bool:
        """Hand records to the system at once: a process that is killed afterwards has not lost them.

        Returns whether the records that follow begin a segment.
        """
        plain: list[Record] = []
        for record in records:
            plain.append(record)
            if isinstance(record, Took) and isinstance(record.message, Command):
                self._write_frame(plain, pack=True)  # it may hold a vocabulary
                plain = []
        if plain:
            self._write_frame(plain)
        if self._written <= self._segment_size:
            return False
        self._next_segment()
        return True

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
            content, flags = zlib.compress(content, 1), PACKED
        frame = memoryview(FRAME.pack(len(content) | flags, zlib.crc32(content)) + content)
        while frame:
            count = os.write(self._file, frame)
            self._written += count
            frame = frame[count:]


def _rotate(path: Path) -> None:
    """Make room for a new segment under the name; the oldest goes."""
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, NUM_SEGMENTS))]
    for newer, older in reversed([*pairwise(names)]):
        if newer.exists():
            newer.replace(older)
