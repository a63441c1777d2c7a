"""Loads for the router of replicas: conversations, caches and queues, simulated. For parallel.py and its test."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict

from quire.engine.router import Router

BLOCK, REPLICAS, BLOCKS = 16, 4, 3000  # tokens of a block; blocks of each replica


def conversations(count: int) -> list[list[int]]:
    """Prompts of 40 conversations over 8 system prompts, each turn a little longer than the one before."""
    rng = random.Random(0)
    systems = [[rng.randrange(50_000) for _ in range(512)] for _ in range(8)]
    talks = [list(rng.choice(systems)) for _ in range(40)]
    prompts = []
    for _ in range(count):
        talk = rng.randrange(len(talks))
        talks[talk] = [*talks[talk], *(rng.randrange(50_000) for _ in range(rng.randrange(16, 96)))]
        if len(talks[talk]) > 2048:
            talks[talk] = list(rng.choice(systems))
        prompts.append(list(talks[talk]))
    return prompts


class Cache:
    """What a replica's KV blocks really hold, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, OrderedDict[int, None]()

    def take(self, names: list[int]) -> int:
        """The hit of a prompt, in blocks; it is held afterwards."""
        hit = next((index for index, name in enumerate(names) if name not in self.held), len(names))
        for name in reversed(names):
            self.held[name] = None
            self.held.move_to_end(name)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)
        return hit


def waits(prompts: list[list[int]], *, routed: bool) -> list[float]:
    """Seconds that requests wait for replicas that compute 4,000 tokens a second, at 60 requests a second, sorted.

    Not `routed`: to the replica that is free first, which is known exactly.
    """
    rng, router, caches = random.Random(1), Router(REPLICAS, BLOCK, BLOCKS), [Cache(BLOCKS) for _ in range(REPLICAS)]
    free, now, found = [0.0] * REPLICAS, 0.0, []
    ends: list[tuple[float, int, int]] = []
    for prompt in prompts:
        now += rng.expovariate(60.0)
        while ends and ends[0][0] <= now:
            router.finish(*heapq.heappop(ends)[1:])
        names = router.names(prompt)
        replica, work = router.choose(names, len(prompt)) if routed else (free.index(min(free)), 0)
        found.append(max(0.0, free[replica] - now))
        free[replica] = max(now, free[replica]) + (len(prompt) - BLOCK * caches[replica].take(names) + 64) / 4000
        if routed:
            heapq.heappush(ends, (free[replica], replica, work))
    return sorted(found)
