"""Loads for the router of replicas: conversations, caches and queues, simulated. For parallel.py and its test."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from typing import Literal

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

    def hit(self, names: list[int]) -> int:
        """Blocks of a prompt's beginning that are held."""
        return next((index for index, name in enumerate(names) if name not in self.held), len(names))

    def take(self, names: list[int]) -> int:
        """The hit of a prompt, in blocks; it is held afterwards."""
        hit = self.hit(names)
        for name in reversed(names):
            self.held[name] = None
            self.held.move_to_end(name)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)
        return hit


Choice = Literal["router", "least loaded", "oracle"]
CHOICES: tuple[Choice, ...] = ("router", "least loaded", "oracle")


def waits(prompts: list[list[int]], choice: Choice) -> list[float]:
    """Seconds until requests have their first token, of replicas that compute 4,000 tokens a second, at 60 requests a
    second, sorted.

    "least loaded": the replica that is free first, whatever it holds. "oracle": the one that is done first. Both know
    times exactly, and the oracle what each cache really holds; the router knows what it has sent.
    """
    rng, router, caches = random.Random(1), Router(REPLICAS, BLOCK, BLOCKS), [Cache(BLOCKS) for _ in range(REPLICAS)]
    free, now, found = [0.0] * REPLICAS, 0.0, []
    ends: list[tuple[float, int, int]] = []
    for prompt in prompts:
        now += rng.expovariate(60.0)
        while ends and ends[0][0] <= now:
            router.finish(*heapq.heappop(ends)[1:])
        names, work = router.names(prompt), 0
        if choice == "router":
            replica, work = router.choose(names, len(prompt))
        else:
            left = [len(prompt) - BLOCK * (cache.hit(names) if choice == "oracle" else 0) for cache in caches]
            replica = min(range(REPLICAS), key=lambda index: max(now, free[index]) + left[index] / 4000)
        free[replica] = max(now, free[replica]) + (len(prompt) - BLOCK * caches[replica].take(names) + 64) / 4000
        found.append(free[replica] - now)
        if choice == "router":
            heapq.heappush(ends, (free[replica], replica, work))
    return sorted(found)
