"""A ring buffer in shared memory: the engine writes a message once, and every rank reads it there."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.parallel.shared_memory import SharedMemory

CAPACITY = 8 << 20
_LINE = 64  # of each rank: how far it has read, and its heartbeats
NOTICE = struct.Struct("<qII")  # the notice of a message: its position (-1: it follows), and its two lengths
_PAUSE = 5e-5  # seconds between two looks at a full ring


def ring_bytes(num_ranks: int) -> int:
    return num_ranks * _LINE + CAPACITY


class RankWords:
    """What a rank tells of itself without a message."""

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        self._words = memory.words(rank * _LINE, 2)

    @property
    def position(self) -> int:
        """Up to where it has read."""
        return int(self._words[0])

    @position.setter
    def position(self, value: int) -> None:
        self._words[0] = value

    @property
    def beats(self) -> int:
        """Counts up for as long as the process gets to run, whatever its steps do; 0 before it can."""
        return int(self._words[1])

    def beat(self) -> None:
        self._words[1] += np.uint64(1)


class RingWriter:
    def __init__(self, memory: SharedMemory, num_ranks: int) -> None:
        self.ranks = [RankWords(memory, rank) for rank in range(num_ranks)]
        self._data = memory.bytes[num_ranks * _LINE :]
        self._position = 0

    def write(self, header: bytes, payload: NDArray[np.uint8], check: Callable[[], None]) -> bytes | None:
        """Write a message and return its notice; None if it is larger than the ring.

        Waits while ranks have not read what lies there, and calls `check` meanwhile, which may raise.
        """
        size = len(header) + len(payload)
        if size > CAPACITY:
            return None
        position = self._position
        if position % CAPACITY + size > CAPACITY:  # messages are in one piece
            position += CAPACITY - position % CAPACITY
        while position + size - min(rank.position for rank in self.ranks) > CAPACITY:
            check()
            time.sleep(_PAUSE)
        start = position % CAPACITY
        self._data[start : start + len(header)] = np.frombuffer(header, dtype=np.uint8)
        self._data[start + len(header) : start + size] = payload
        self._position = position + size
        return NOTICE.pack(position, len(header), len(payload))


class RingReader:
    def __init__(self, memory: SharedMemory, rank: int, num_ranks: int) -> None:
        self.words = RankWords(memory, rank)
        self._data = memory.bytes[num_ranks * _LINE :]

    def read(self, position: int, header: int, payload: int) -> tuple[bytes, NDArray[np.uint8]]:
        """The message at `position`; its payload stays as it is until `release`."""
        start = position % CAPACITY
        middle = start + header
        return self._data[start:middle].tobytes(), self._data[middle : middle + payload]

    def release(self, position: int, size: int) -> None:
        """Let the writer have the place of a message."""
        self.words.position = position + size
