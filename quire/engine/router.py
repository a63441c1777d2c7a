"""Router: which replica a request goes to. Knows prefixes and loads, not processes.

A request goes where it would be done first: each replica has work before it, and would have to compute those tokens
of the prompt that it does not hold. A replica holds the blocks that it says it has cached, and those of prompts that
were sent there and are not computed yet. Requests of one session stay in one replica unless that has much more to do
than another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DECODE_WEIGHT = 32  # prompt tokens that a running request counts for: what it delays others by while it decodes
STICKY_TOKENS = 4096  # prompt tokens of work by which a session's replica may be behind before the session moves
_MOST_SESSIONS = 1 << 16  # that are remembered


@dataclass(slots=True)
class Ticket:
    """What a request is to the router while it runs."""

    replica: int = -1  # -1: none has it
    work: int = 0  # that the load of its replica has grown by
    coming: Sequence[int] = ()  # blocks that the replica will have once the prompt is computed


class Router:
    def __init__(self, num_replicas: int, block_size: int, *, releases_blocks: bool = False) -> None:
        """`releases_blocks`: layers see a window or keep a state, so a hit needs its last blocks alone."""
        self._block_size, self._by_last = block_size, releases_blocks
        self._holders: dict[int, int] = {}  # block's name -> bit mask of the replicas that hold it
        self._cached: list[set[int]] = [set() for _ in range(num_replicas)]  # as each has told
        self._coming: list[Counter[int]] = [Counter() for _ in range(num_replicas)]  # for how many tickets
        self._homes: OrderedDict[int, int] = OrderedDict()  # session -> its replica, least recent first
        self.loads = [0] * num_replicas
        self._closed = [False] * num_replicas

    @property
    def is_open(self) -> bool:
        """Whether any replica takes requests."""
        return not all(self._closed)

    def choose(self, names: Sequence[int], num_tokens: int, session: int = 0) -> Ticket:
        """Where a prompt of `num_tokens` with these blocks goes; the replica's load has grown by it.

        `session` stands for a conversation, or what else is to stay together; 0: nothing. Some replica must be open.
        """
        counts = self._hits(names)
        size, best, least = self._block_size, -1, 0
        home = self._homes.pop(session, -1) if session else -1
        for replica, load in enumerate(self.loads):
            if self._closed[replica]:
                continue
            end = load + num_tokens - counts[replica] * size - (STICKY_TOKENS if replica == home else 0)
            if best < 0 or end < least:
                best, least = replica, end
        assert best >= 0, "every replica is closed"
        ticket = Ticket(best, num_tokens - counts[best] * size + DECODE_WEIGHT, names[counts[best] :])
        self.loads[best] += ticket.work
        self._hold(best, ticket.coming)
        self._coming[best].update(ticket.coming)
        if session:
            self._homes[session] = best
            if len(self._homes) > _MOST_SESSIONS:
                self._homes.popitem(last=False)
        return ticket

    def computed(self, ticket: Ticket) -> None:
        """The prompt is computed, or never will be: what is cached of it, the replica has told."""
        coming, cached = self._coming[ticket.replica], self._cached[ticket.replica]
        for name in ticket.coming:
            count = coming.pop(name)
            if count > 1:
                coming[name] = count - 1
            elif name not in cached:
                self._forget(name, ticket.replica)
        ticket.coming = ()

    def finish(self, ticket: Ticket) -> None:
        """A request has ended."""
        self.computed(ticket)
        self.loads[ticket.replica] -= ticket.work

    def update(self, replica: int, stored: Iterable[int], evicted: Iterable[int], *, is_all: bool) -> None:
        """A replica has cached and evicted blocks; with `is_all`, it has cached those that are stored alone."""
        cached, coming = self._cached[replica], self._coming[replica]
        if is_all:
            evicted = cached.difference(stored)
        self._hold(replica, stored)
        cached.update(stored)
        cached.difference_update(evicted)
        for name in evicted:
            if name not in coming:
                self._forget(name, replica)

    def add(self) -> None:
        """One more replica, which is closed."""
        self._cached.append(set())
        self._coming.append(Counter())
        self.loads.append(0)
        self._closed.append(True)

    def drop(self) -> None:
        """The last replica is no more."""
        self.close(len(self.loads) - 1, is_lost=True)
        for column in (self._cached, self._coming, self.loads, self._closed):
            column.pop()

    def close(self, replica: int, *, is_lost: bool) -> None:
        """No request goes there any more. One that is lost holds nothing afterwards, and has no load."""
        self._closed[replica] = True
        if is_lost:
            for name in self._cached[replica] | self._coming[replica].keys():
                self._forget(name, replica)
            self._cached[replica], self._coming[replica], self.loads[replica] = set(), Counter(), 0

    def open(self, replica: int) -> None:
        self._closed[replica] = False

    def _hits(self, names: Sequence[int]) -> list[int]:
        """Of each replica, the number of blocks that it need not compute of this prompt's beginning."""
        counts = [0] * len(self.loads)
        mask, depth = (1 << len(counts)) - 1, 0
        holders = self._holders
        if self._by_last:
            for depth, name in enumerate(names, 1):
                if name in holders:
                    held = holders[name]
                    counts = [depth if held >> replica & 1 else count for replica, count in enumerate(counts)]
            return counts
        for name in names:
            held = holders.get(name, 0) & mask
            if held != mask:
                lost = mask & ~held
                for replica in range(len(counts)):
                    if lost >> replica & 1:
                        counts[replica] = depth
                mask = held
                if not mask:
                    return counts
            depth += 1
        for replica in range(len(counts)):
            if mask >> replica & 1:
                counts[replica] = depth
        return counts

    def _hold(self, replica: int, names: Iterable[int]) -> None:
        holders, bit = self._holders, 1 << replica
        for name in names:
            holders[name] = holders.get(name, 0) | bit

    def _forget(self, name: int, replica: int) -> None:
        left = self._holders.pop(name, 0) & ~(1 << replica)
        if left:
            self._holders[name] = left
