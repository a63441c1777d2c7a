"""The router: fast, near the hits of one big cache, and near the waiting times of the least-loaded replica."""

from __future__ import annotations

import time

from benchmarks.router_loads import BLOCK, BLOCKS, CHOICES, REPLICAS, Cache, conversations, waits
from quire.engine.router import STICKY_TOKENS, Router


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


def test_waits_are_near_those_of_one_who_knows_all_caches_and_times() -> None:
    prompts = conversations(6000)
    routed, blind, oracle = (waits(prompts, choice)[5940] for choice in CHOICES)
    print(f"p99 {routed:.3f} s; least loaded {blind:.3f} s; oracle {oracle:.3f} s")
    assert routed <= 1.3 * oracle
    assert routed <= 1.3 * blind


def test_decisions_are_fast() -> None:
    """Far from the 10,000 a second that it makes on a quiet core, so that a busy machine does not fail this."""
    prompts, router = conversations(2000), Router(REPLICAS, BLOCK, BLOCKS)
    begin = time.process_time()
    for prompt in prompts:
        router.finish(*router.choose(router.names(prompt), len(prompt)))
    rate = len(prompts) / (time.process_time() - begin)
    print(f"{rate:.0f} decisions a second")
    assert rate > 3000


def test_a_session_stays_in_its_replica_unless_that_is_overloaded_or_gone() -> None:
    router = Router(3, BLOCK, 100)
    prompts = [router.names([index] * 64) for index in range(8)]
    home, _ = router.choose(prompts[0], 64, session=7)
    for names in prompts[1:5]:
        assert router.choose(names, 64, session=7)[0] == home  # others have less to do
    assert router.choose(prompts[5], 64)[0] != home
    router.loads[home] += STICKY_TOKENS
    moved, _ = router.choose(prompts[6], 64, session=7)
    assert moved != home
    router.loads[home] = 0
    assert router.choose(prompts[7], 64, session=7)[0] == moved  # that is its home now
    router.close(moved, is_lost=True)
    assert router.choose(prompts[7], 64, session=7)[0] != moved


def test_what_was_generated_counts_and_what_was_reset_does_not() -> None:
    router = Router(2, BLOCK, 100)
    first, work = router.choose(router.names(list(range(64))), 64)
    router.finish(first, work)
    answered = router.names(list(range(128)))
    router.hold(first, answered)
    router.loads[first] = 63  # more than the prompt's blocks are worth alone
    assert router._hits(answered)[first] == 8
    assert router.choose(answered, 128)[0] == first
    router.reset(first)
    assert router._hits(answered) == [0, 0]
    assert router.choose(answered, 128)[0] == 1 - first


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
