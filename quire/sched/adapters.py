"""Slots of LoRA adapters: which adapters are resident on the device, and who may start because of that."""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire.sched.request import Request
from quire.types.step import AdapterLoad

PATIENCE = 64  # steps that a request waits for a slot while others with adapters start


class NoAdapterSlots:
    """No request has an adapter."""

    def begin(self) -> None:
        """A step is about to be planned."""

    def may_start(self, request: Request) -> bool:
        """Whether its adapter has a slot or can get one; if not, those behind it may start."""
        return True

    def has_room(self, request: Request) -> bool:
        """Whether `take` can be called."""
        return True

    def take(self, request: Request) -> tuple[int, list[AdapterLoad]]:
        """The slot of a request that starts, -1 for none, and what has to go into it first."""
        return -1, []

    def give_back(self, request: Request) -> None:
        """A request that had started gives up its row."""

    def forget(self, loads: Iterable[AdapterLoad]) -> None:
        """It is not known whether these were done; nobody runs with them."""

    def clear(self) -> None:
        """Nobody runs, and all slots are to be filled anew."""


class AdapterSlots(NoAdapterSlots):
    """An adapter leaves when another needs its slot and nobody runs with it, the least recently used first.

    Slots are for ranks up to some number; an adapter takes one of the smallest that it fits into, a larger one if
    there is nothing else. While a request waits for a slot, others whose adapter has one start, and those that need
    one do not. After PATIENCE steps nobody with an adapter does, so that its turn comes.
    """

    def __init__(self, buckets: Sequence[tuple[int, int]]) -> None:
        """`buckets`: (rank, slots of it), the lowest rank first."""
        self._rooms = [rank for rank, count in buckets for _ in range(count)]  # by slot
        self._free = list(range(len(self._rooms)))
        self._resident: OrderedDict[str, int] = OrderedDict()  # digest -> slot, the least recently used first
        self._running: Counter[str] = Counter()  # requests by digest
        self._waits = False  # someone does, in this step
        self._num_waited = 0  # steps, one after the other, in which someone did

    def begin(self) -> None:
        self._num_waited = self._num_waited + 1 if self._waits else 0
        self._waits = False

    def may_start(self, request: Request) -> bool:
        digest = _digest(request)
        if digest is None or (digest in self._resident and self._num_waited < PATIENCE):
            return True
        if self._waits:
            return False
        self._waits = not self.has_room(request)
        return not self._waits

    def has_room(self, request: Request) -> bool:
        digest = _digest(request)
        return digest is None or digest in self._resident or self._vacant(request) is not None

    def take(self, request: Request) -> tuple[int, list[AdapterLoad]]:
        digest = _digest(request)
        if digest is None:
            return -1, []
        loads = []
        if digest not in self._resident:
            self._resident[digest] = self._vacate(request)
            self._num_waited = 0
            loads = [AdapterLoad(self._resident[digest], digest)]
        self._resident.move_to_end(digest)
        self._running[digest] += 1
        return self._resident[digest], loads

    def give_back(self, request: Request) -> None:
        digest = _digest(request)
        if digest is not None:
            self._running[digest] -= 1
            if not self._running[digest]:
                del self._running[digest]

    def forget(self, loads: Iterable[AdapterLoad]) -> None:
        for load in loads:
            if self._resident.get(load.digest) == load.slot:
                insort(self._free, self._resident.pop(load.digest))

    def clear(self) -> None:
        assert not self._running.total(), "somebody runs with an adapter"
        self._free = sorted([*self._free, *self._resident.values()])
        self._resident.clear()

    def _vacate(self, request: Request) -> int:
        slot = self._vacant(request)
        assert slot is not None, "there was no room"
        if slot in self._free:
            self._free.remove(slot)
        else:
            del self._resident[next(digest for digest, found in self._resident.items() if found == slot)]
        return slot

    def _vacant(self, request: Request) -> int | None:
        """The slot that its adapter would take: a free one, else that of the least recently used idle adapter."""
        adapter = request.engine_request.adapter
        rank = 0 if adapter is None else min(adapter.rank, self._rooms[-1])  # it has been read, so it fits somewhere
        idle = [slot for digest, slot in self._resident.items() if not self._running[digest]]
        fitting = [slot for slot in (*self._free, *idle) if self._rooms[slot] >= rank]
        return min(fitting, key=lambda slot: (slot not in self._free, self._rooms[slot]), default=None)


def _digest(request: Request) -> str | None:
    adapter = request.engine_request.adapter
    return None if adapter is None else adapter.digest
