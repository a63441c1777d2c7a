"""The router: fast, near the hits of one big cache, and near the waiting times of the least-loaded replica."""

from __future__ import annotations

from benchmarks.router_loads import (
    BLOCK,
    BLOCKS,
    CHOICES,
    REPLICAS,
    Cache,
    conversations,
    names,
    routed_hits,
    waits,
)
from quire.engine.router import STICKY_TOKENS, Router, Ticket


def test_shared_prefixes_hit_as_in_one_big_cache() -> None:
    prompts, big = conversations(4000), Cache(REPLICAS * BLOCKS)
    hits, _ = routed_hits(prompts)
    most = sum(big.take(names(prompt))[0] for prompt in prompts)
    assert hits >= 0.9 * most, (hits, most)


def test_waits_are_near_those_of_one_who_knows_all_caches_and_times() -> None:
    prompts = conversations(6000)
    routed, blind, oracle = (waits(prompts, choice)[5940] for choice in CHOICES)
    print(f"p99 {routed:.3f} s; least loaded {blind:.3f} s; oracle {oracle:.3f} s")
    assert routed <= 1.3 * oracle
    assert routed <= 1.3 * blind


def test_decisions_are_fast() -> None:
    """Far from the 10,000 a second that it makes on a quiet core, so that a busy machine does not fail this."""
    prompts = conversations(2000)
    rate = len(prompts) / min(routed_hits(prompts)[1] for _ in range(2))
    print(f"{rate:.0f} decisions a second")
    assert rate > 3000


def test_a_session_stays_in_its_replica_unless_that_is_overloaded_or_gone() -> None:
    router = Router(3, BLOCK)
    prompts = [names([index] * 64) for index in range(8)]
    home = router.choose(prompts[0], 64, session=7).replica
    for prompt in prompts[1:5]:
        assert router.choose(prompt, 64, session=7).replica == home  # others have less to do
    assert router.choose(prompts[5], 64).replica != home
    router.loads[home] += STICKY_TOKENS
    moved = router.choose(prompts[6], 64, session=7).replica
    assert moved != home
    router.loads[home] = 0
    assert router.choose(prompts[7], 64, session=7).replica == moved  # that is its home now
    router.close(moved, is_lost=True)
    assert router.choose(prompts[7], 64, session=7).replica != moved


def test_what_a_replica_tells_counts_and_what_it_evicts_does_not() -> None:
    router = Router(2, BLOCK)
    ticket = router.choose(names(list(range(64))), 64)
    first, answered = ticket.replica, names(list(range(128)))
    assert router._hits(answered)[first] == 4  # on their way
    router.update(first, answered, (), is_all=False)
    router.finish(ticket)
    router.loads[first] = 63  # more than the prompt's blocks are worth alone
    assert router._hits(answered)[first] == 8
    router.finish(router.choose(answered, 128))
    router.update(first, (), answered[6:], is_all=False)
    assert router._hits(answered)[first] == 6
    router.update(first, answered[:2], (), is_all=True)
    assert router._hits(answered)[first] == 2
    router.update(first, (), answered[:2], is_all=False)
    assert router._hits(answered) == [0, 0]
    assert router._holders == {}
    assert router.choose(answered, 128).replica == 1 - first


def test_prompts_on_their_way_count_until_each_of_them_is_computed() -> None:
    router = Router(1, BLOCK)
    prompt = names(list(range(64)))
    tickets = [Ticket(0, 0, prompt[:2]), Ticket(0, 0, prompt)]
    for ticket in tickets:
        router._hold(0, ticket.coming)
        router._coming[0].update(ticket.coming)
    router.computed(tickets[1])  # nothing of it was cached
    assert router._hits(prompt) == [2]
    router.computed(tickets[0])
    assert router._hits(prompt) == [0]


def test_with_windows_and_states_the_last_cached_block_decides() -> None:
    router = Router(2, BLOCK, releases_blocks=True)
    prompt = names(list(range(128)))
    router.update(0, [prompt[1], prompt[5]], (), is_all=True)
    router.update(1, [prompt[3]], (), is_all=True)
    assert router._hits(prompt) == [6, 4]
    assert router._hits(prompt[:5]) == [2, 4]


def test_a_closed_replica_gets_nothing_and_a_lost_one_is_forgotten() -> None:
    router = Router(2, BLOCK)
    prompt = names(list(range(64)))
    ticket = router.choose(prompt, 64)
    first = ticket.replica
    router.update(first, prompt, (), is_all=False)
    router.finish(ticket)
    assert router.choose(prompt, 64).replica == first  # the prefix is there
    router.close(first, is_lost=False)
    assert router.choose(prompt, 64).replica == 1 - first
    router.close(first, is_lost=True)
    router.open(first)
    assert router.loads[first] == 0
    router.loads[1 - first] = 0
    assert router.choose(prompt, 64).replica == 1 - first  # which gets it now
    router.close(1 - first, is_lost=True)
    router.close(first, is_lost=True)
    assert not router.is_open
    assert router._holders == {}
