"""Router: which replica a request goes to. Knows prefixes and loads, not processes.

A request goes where it would be done first: each replica has work before it, and would have to compute those tokens
of the prompt that it does not hold. What a replica holds is what was sent and generated there, as far as its KV
blocks reach. Requests of one session stay in one replica unless that has much more to do than another.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

DECODE_WEIGHT = 32  # prompt tokens that a running request counts for: what it delays others by while it decodes
STICKY_TOKENS = 4096  # prompt tokens of work by which a session's replica may be behind before the session moves
_MOST_SESSIONS = 1 << 16  # that are remembered


class Router:
    def __init__(self, num_replicas: int, block_size: int, blocks_per_replica: int) -> None:
        self._block_size, self._capacity = block_size, blocks_per_replica
        self._holders: dict[int, int] = {}  # block's name -> bit mask of the replicas that hold it
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]  # least recent first
        self._homes: OrderedDict[int, int] = OrderedDict()  # session -> its replica, least recent first
        self.loads = [0] * num_replicas
        self._closed = [False] * num_replicas

    @property
    def is_open(self) -> bool:
        """Whether any replica takes requests."""
        return not all(self._closed)

    def names(self, token_ids: Sequence[int], root: int = 0) -> list[int]:
        """Names of a prompt's full blocks, each for itself and all before it. They collide seldom, which costs a hit.

        `root` stands for what else decides about sharing: a salt, an adapter.
        """
        size, name, found = 4 * self._block_size, root, []
        packed = array("I", token_ids).tobytes()
        for start in range(0, len(packed) - size + 1, size):
            name = hash((name, packed[start : start + size]))
            found.append(name)
        return found

    def choose(self, names: Sequence[int], num_tokens: int, session: int = 0) -> tuple[int, int]:
        """(replica, what its load grows by) for a prompt of `num_tokens` with these blocks; it then holds them.

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
        work = num_tokens - counts[best] * size + DECODE_WEIGHT
        self.loads[best] += work
        self.hold(best, names)
        if session:
            self._homes[session] = best
            if len(self._homes) > _MOST_SESSIONS:
                self._homes.popitem(last=False)
        return best, work

    def add(self) -> None:
        """One more replica, which is closed."""
        self._held.append(OrderedDict())
        self.loads.append(0)
        self._closed.append(True)

    def drop(self) -> None:
        """The last replica is no more."""
        self.close(len(self.loads) - 1, is_lost=True)
        for column in (self._held, self.loads, self._closed):
            column.pop()

    def finish(self, replica: int, work: int) -> None:
        """A request that its load had grown by has ended."""
        self.loads[replica] -= work

    def close(self, replica: int, *, is_lost: bool) -> None:
        """No request goes there any more. One that is lost holds nothing afterwards, and has no load."""
        self._closed[replica] = True
        if is_lost:
            self.reset(replica)
            self.loads[replica] = 0

    def reset(self, replica: int) -> None:
        """Its cache is empty."""
        bit = ~(1 << replica)
        for name in self._held[replica]:
            self._forget(name, bit)
        self._held[replica].clear()

    def open(self, replica: int) -> None:
        self._closed[replica] = False

    def _hits(self, names: Sequence[int]) -> list[int]:
        """Of each replica, the number of blocks that it holds of this prompt's beginning."""
        counts = [0] * len(self.loads)
        mask, depth = (1 << len(counts)) - 1, 0
        holders = self._holders
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

    def hold(self, replica: int, names: Sequence[int]) -> None:
        """A replica has these blocks in its cache, of a prompt or of what was generated behind it."""
        held, holders, bit = self._held[replica], self._holders, 1 << replica
        for name in reversed(names):  # the beginnings of prompts stay longest, as in the KV cache
            if name in held:
                held.move_to_end(name)
            else:
                held[name] = None
                holders[name] = holders.get(name, 0) | bit
        while len(held) > self._capacity:
            self._forget(held.popitem(last=False)[0], ~bit)

    def _forget(self, name: int, others: int) -> None:
        left = self._holders[name] & others
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]
