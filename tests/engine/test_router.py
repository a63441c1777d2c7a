"""The router: fast, near the hits of one big cache, and near the waiting times of the least-loaded replica."""

from __future__ import annotations

import time

from benchmarks.router_loads import BLOCK, BLOCKS, REPLICAS, Cache, conversations, waits
from quire.engine.router import Router


def test_shared_prefixes_hit_as_in_one_big_cache() -> None:
    prompts, router = conversations(4000), Router(REPLICAS, BLOCK, BLOCKS)
    caches, big = [Cache(BLOCKS) for _ in range(REPLICAS)], Cache(REPLICAS * BLOCKS)
    running: list[tuple[int, int]] = []
    hits = most = 0
    for prompt in prompts:
        names = router.names(prompt)
        replica, work = router.choose(names, len(prompt))
        running.append((replica, work))
        if len(running) > 16:
            router.finish(*running.pop(0))
        hits += caches[replica].take(names)
        most += big.take(names)
    assert hits >= 0.9 * most, (hits, most)


def test_waits_are_near_those_of_the_least_loaded_replica() -> None:
    prompts = conversations(6000)
    routed, ideal = (waits(prompts, routed=routed) for routed in (True, False))
    at = int(0.99 * len(prompts))
    print(f"p99 {routed[at]:.3f} s; least loaded {ideal[at]:.3f} s")
    assert routed[at] <= 1.3 * ideal[at]


def test_decisions_are_fast() -> None:
    """Far from the 10,000 a second that it makes on a quiet core, so that a busy machine does not fail this."""
    prompts, router = conversations(2000), Router(REPLICAS, BLOCK, BLOCKS)
    begin = time.process_time()
    for prompt in prompts:
        router.finish(*router.choose(router.names(prompt), len(prompt)))
    rate = len(prompts) / (time.process_time() - begin)
    print(f"{rate:.0f} decisions a second")
    assert rate > 3000


def test_a_closed_replica_gets_nothing_and_a_lost_one_is_forgotten() -> None:
    router = Router(2, BLOCK, 100)
    names = router.names(list(range(64)))
    first, work = router.choose(names, 64)
    router.finish(first, work)
    assert router.choose(names, 64)[0] == first  # the prefix is there
    router.close(first, is_lost=False)
    assert router.choose(names, 64)[0] == 1 - first
    router.close(first, is_lost=True)
    router.open(first)
    assert router.loads[first] == 0
    router.finish(1 - first, router.loads[1 - first])
    assert router.choose(names, 64)[0] == 1 - first  # which holds it now
    router.close(1 - first, is_lost=True)
    router.close(first, is_lost=True)
    assert not router.is_open


def test_other_salts_share_nothing() -> None:
    router = Router(2, BLOCK, 100)
    assert not set(router.names(list(range(64)), root=1)) & set(router.names(list(range(64)), root=2))
    assert len(router.names(list(range(63)))) == 3
