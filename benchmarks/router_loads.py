"""Loads for the router of replicas: conversations, caches and queues, simulated. For parallel.py and its test."""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict, deque
from typing import Literal

from quire.engine.router import Router, Ticket
from quire.kv.hashing import HashChain
from quire.kv.stream import block_names
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

BLOCK, REPLICAS, BLOCKS = 16, 4, 3000  # tokens of a block; blocks of each replica
_PARAMS = SamplingParams()


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


def names(prompt: list[int]) -> list[int]:
    """What the router calls a prompt's full blocks, made as for a request."""
    chain = HashChain(EngineRequest(request_id="", token_ids=prompt, params=_PARAMS), BLOCK)
    chain.extend(prompt, len(prompt))
    return block_names(chain.hashes)


class Cache:
    """What a replica's KV blocks really hold, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, OrderedDict[int, None]()

    def hit(self, names: list[int]) -> int:
        """Blocks of a prompt's beginning that are held."""
        return next((index for index, name in enumerate(names) if name not in self.held), len(names))

    def take(self, names: list[int]) -> tuple[int, list[int]]:
        """The hit of a prompt, in blocks, and what is evicted for it; it is held afterwards."""
        hit, evicted = self.hit(names), []
        for name in reversed(names):
            self.held[name] = None
            self.held.move_to_end(name)
        while len(self.held) > self.capacity:
            evicted.append(self.held.popitem(last=False)[0])
        return hit, evicted


def routed_hits(prompts: list[list[int]]) -> tuple[int, float]:
    """Blocks that routed prompts find cached, 16 of them running at a time, and the router's seconds of CPU time.

    Those are for naming blocks, choosing, hearing what the replicas have cached and evicted, and forgetting requests.
    """
    router, caches = Router(REPLICAS, BLOCK), [Cache(BLOCKS) for _ in range(REPLICAS)]
    running: deque[Ticket] = deque()
    hits, spent = 0, 0.0
    for prompt in prompts:
        begin = time.thread_time()
        blocks = names(prompt)
        running.append(router.choose(blocks, len(prompt)))
        spent += time.thread_time() - begin
        replica = running[-1].replica
        hit, evicted = caches[replica].take(blocks)
        hits += hit
        begin = time.thread_time()
        router.update(replica, blocks[hit:], evicted, is_all=False)
        if len(running) > 16:
            router.finish(running.popleft())
        spent += time.thread_time() - begin
    return hits, spent


Choice = Literal["router", "least loaded", "oracle"]
CHOICES: tuple[Choice, ...] = ("router", "least loaded", "oracle")


def waits(prompts: list[list[int]], choice: Choice) -> list[float]:
    """Seconds until requests have their first token, of replicas that compute 4,000 tokens a second, at 60 requests a
    second, sorted.

    "least loaded": the replica that is free first, whatever it holds. "oracle": the one that is done first. Both know
    times exactly, and the oracle what each cache will hold; the router knows what it has sent and what caches tell.
    """
    rng, router, caches = random.Random(1), Router(REPLICAS, BLOCK), [Cache(BLOCKS) for _ in range(REPLICAS)]
    free, now, found = [0.0] * REPLICAS, 0.0, []
    ends: list[tuple[float, int, Ticket]] = []
    for prompt in prompts:
        now += rng.expovariate(60.0)
        while ends and ends[0][0] <= now:
            router.finish(heapq.heappop(ends)[2])
        blocks, ticket = names(prompt), Ticket()
        if choice == "router":
            ticket = router.choose(blocks, len(prompt))
            replica = ticket.replica
        else:
            left = [len(prompt) - BLOCK * (cache.hit(blocks) if choice == "oracle" else 0) for cache in caches]
            replica = min(range(REPLICAS), key=lambda index: max(now, free[index]) + left[index] / 4000)
        hit, evicted = caches[replica].take(blocks)
        free[replica] = max(now, free[replica]) + (len(prompt) - BLOCK * hit + 64) / 4000
        found.append(free[replica] - now)
        if choice == "router":
            router.update(replica, blocks, evicted, is_all=False)
            heapq.heappush(ends, (free[replica], len(found), ticket))
    return sorted(found)
