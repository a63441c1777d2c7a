from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.kv.deltas import BlockDeltas
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager, KVSequence
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

FULL = [LayerKV("full", None, 1)]
MIXED = [LayerKV("full", None, 1), LayerKV("sliding", 6, 1), LayerKV("sliding", 6, 1)]


def make(layers: list[LayerKV] = FULL, num_blocks: int = 40, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(plan_layout(layers, 4), num_blocks, caching)


def request(token_ids: Iterable[int], **extra: Any) -> EngineRequest:
    return EngineRequest(request_id="r", token_ids=list(token_ids), params=SamplingParams(), **extra)


def start(kv: KVCacheManager, engine_request: EngineRequest) -> KVSequence:
    """Begin a request and compute nothing yet; asserts that there was room."""
    sequence = kv.open(engine_request)
    hit = kv.find_prefix(sequence, engine_request.token_ids)
    assert kv.start(sequence, hit, len(engine_request.token_ids), 0, BlockDeltas())
    return sequence


def run_once(kv: KVCacheManager, engine_request: EngineRequest) -> None:
    """Compute a prompt and end it, leaving its blocks cached."""
    sequence = start(kv, engine_request)
    kv.store(sequence, engine_request.token_ids, len(engine_request.token_ids))
    kv.free(sequence)


def hit_length(kv: KVCacheManager, engine_request: EngineRequest) -> int:
    return kv.find_prefix(kv.open(engine_request), engine_request.token_ids).num_tokens


def ids(sequence: KVSequence, group: int = 0) -> list[int]:
    return [block.id for block in sequence.tables[group]]


def test_a_hit_never_covers_the_whole_prompt() -> None:
    kv = make()
    run_once(kv, request(range(8)))
    assert hit_length(kv, request(range(8))) == 4
    assert hit_length(kv, request(range(9))) == 8
    assert hit_length(kv, request(range(4))) == 0
    assert hit_length(kv, request([*range(4), *range(50, 60)])) == 4


def test_another_salt_hits_nothing() -> None:
    kv = make()
    run_once(kv, request(range(8), cache_salt="a"))
    assert hit_length(kv, request(range(9), cache_salt="a")) == 8
    assert hit_length(kv, request(range(9))) == 0
    assert hit_length(kv, request(range(9), cache_salt="b")) == 0


def test_shared_blocks_are_counted_and_survive_one_owner() -> None:
    kv = make()
    first = start(kv, request(range(9)))
    kv.store(first, list(range(9)), 9)
    second = start(kv, request(range(9)))
    assert ids(first)[:2] == ids(second)[:2]
    assert ids(first)[2] != ids(second)[2]
    kv.check_integrity([first, second])
    kv.free(first)
    kv.check_integrity([second])
    kv.free(second)
    assert kv.num_free_blocks == kv.num_blocks == 39


def test_blocks_are_cached_only_once_computed() -> None:
    kv = make()
    sequence = start(kv, request(range(12)))
    assert hit_length(kv, request(range(12))) == 0
    assert kv.store(sequence, list(range(12)), 7) == 8
    assert hit_length(kv, request(range(12))) == 4
    kv.free(sequence)
    assert hit_length(kv, request(range(12))) == 4


def test_output_tokens_extend_the_chain() -> None:
    kv = make()
    sequence = start(kv, request(range(6)))
    known = [*range(6), 70, 71, 72]
    assert kv.allocate(sequence, 6, 9, 0, BlockDeltas())
    kv.store(sequence, known, 8)
    assert hit_length(kv, request([*range(6), 70, 71, 1])) == 8
    assert hit_length(kv, request([*range(6), 70, 99, 1])) == 4


def test_allocation_is_all_or_nothing() -> None:
    kv = make(MIXED, num_blocks=10)
    deltas = BlockDeltas()
    sequence = kv.open(request(range(30)))
    assert not kv.start(sequence, kv.no_prefix(), 13, 0, deltas)
    assert kv.num_free_blocks == 9
    assert kv.start(sequence, kv.no_prefix(), 12, 0, deltas)
    assert kv.num_free_blocks == 0
    assert len(deltas.ids) == 9
    assert not kv.allocate(sequence, 4, 13, 0, deltas)
    assert len(deltas.ids) == 9
    kv.check_integrity([sequence])


def test_start_counts_free_hit_blocks_as_taken() -> None:
    kv = make(num_blocks=6)
    run_once(kv, request(range(12)))
    sequence = kv.open(request(range(24)))
    hit = kv.find_prefix(sequence, list(range(24)))
    assert hit.num_tokens == 12
    assert not kv.start(sequence, hit, 24, 0, BlockDeltas()), "3 revived and 3 new, but there are 5"
    assert kv.fits_now(hit, 20, 20, 0)
    assert not kv.fits_now(hit, 20, 20, 1)
    assert kv.start(sequence, hit, 20, 0, BlockDeltas())
    kv.check_integrity([sequence])


def test_sliding_groups_give_back_what_fell_out_of_sight() -> None:
    kv = make(MIXED)
    sequence = start(kv, request(range(16)))
    deltas = BlockDeltas()
    assert kv.allocate(sequence, 16, 17, 5, deltas)
    # The token at 16 sees 11..16: blocks 0 and 1 go, in both sliding groups.
    assert [block.id == 0 for block in sequence.tables[1]] == [True, True, False, False, False]
    nulled = [
        (row, group, index)
        for row, group, index, block in zip(deltas.rows, deltas.groups, deltas.indices, deltas.ids, strict=True)
        if block == 0
    ]
    assert nulled == [(5, 1, 0), (5, 1, 1), (5, 2, 0), (5, 2, 1)]
    assert all(ids(sequence))
    kv.check_integrity([sequence])
    assert kv.num_free_blocks == 39 - 5 - 3 - 3


def test_blocks_that_leave_a_window_make_room_unless_others_hold_them() -> None:
    kv = make([LayerKV("sliding", 4, 1)], num_blocks=1 + 5)
    prompt = list(range(13))
    first = start(kv, request(prompt))
    kv.store(first, prompt, 12)
    assert kv.num_free_blocks == 1
    second = start(kv, request(prompt))  # shares block 2
    assert kv.num_free_blocks == 0
    deltas = BlockDeltas()
    assert not kv.allocate(first, 4, 17, 0, deltas), "at 4 tokens, the window is 1..4"
    assert (deltas.ids, [bool(block) for block in ids(first)]) == ([], [True] * 4), "nothing was given back in vain"
    assert kv.allocate(first, 7, 17, 0, deltas)
    assert [bool(block) for block in ids(first)] == [False, True, True, True, True]
    assert not kv.allocate(first, 16, 25, 0, deltas), "blocks 1 and 3 would be free, and 2 new ones fit only if 2 was"
    assert kv.allocate(first, 16, 21, 0, deltas)
    kv.check_integrity([first, second])


@given(st.integers(1, 9), st.integers(8, 24), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=20))
def test_what_a_token_behind_the_certain_ones_sees_is_there(
    window: int, num_blocks: int, steps: list[tuple[int, int]]
) -> None:
    """Whatever is planned ahead of the certain count, and however much of it is taken back."""
    kv = make([LayerKV("full", None, 1), LayerKV("sliding", window, 1)], num_blocks=num_blocks)
    sequence = start(kv, request(range(5)))
    certain, table = 0, {}
    for held, ahead in steps:
        deltas = BlockDeltas()
        end = min(certain + held, kv.capacity(sequence))
        before = [list(blocks) for blocks in sequence.tables]
        fits = kv.allocate(sequence, end, end + ahead, 0, deltas)
        kv.check_integrity([sequence])
        if not fits:
            assert (sequence.tables, deltas.ids) == (before, [])
            continue
        certain = end
        assert kv.capacity(sequence) >= certain + ahead
        table |= dict(zip(zip(deltas.groups, deltas.indices, strict=True), deltas.ids, strict=True))
        assert all(ids(sequence, 0))
        assert all(ids(sequence, 1)[max(0, certain - window + 1) // 4 :])
        for group, index in table:
            assert ids(sequence, group)[index] == table[group, index], "the worker was told"


def test_sliding_hit_needs_only_its_window_and_all_groups() -> None:
    kv = make(MIXED)
    prompt = list(range(21))
    run_once(kv, request(prompt))
    sequence = kv.open(request(prompt))
    hit = kv.find_prefix(sequence, prompt)
    assert hit.num_tokens == 20
    deltas = BlockDeltas()
    assert kv.start(sequence, hit, 21, 3, deltas)
    # The token at 20 sees 15..20: block 3 on.
    assert [bool(block_id) for block_id in ids(sequence, 1)] == [False, False, False, True, True, True]
    written = {(g, i) for g, i in zip(deltas.groups, deltas.indices, strict=True)}
    assert written == {(g, i) for g in range(3) for i in range(6)}, "null entries are told to the worker too"
    kv.check_integrity([sequence])


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9))))
def test_a_hit_is_the_longest_that_all_groups_can_serve(lost: set[tuple[int, int]]) -> None:
    kv = make(MIXED)
    prompt = list(range(41))
    sequence = start(kv, request(prompt))
    kv.store(sequence, prompt, 41)
    blocks = [list(table) for table in sequence.tables]
    kv.free(sequence)
    for group, index in lost:
        kv._pools[0].pool._forget(blocks[group][index])

    def usable(count: int) -> bool:
        first_visible = max(0, 4 * count - 5) // 4
        needed = {(0, i) for i in range(count)} | {(g, i) for g in (1, 2) for i in range(first_visible, count)}
        return not needed & lost

    assert hit_length(kv, request(prompt)) == 4 * max(count for count in range(11) if usable(count))


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = make(caching=False)
    run_once(kv, request(range(8)))
    assert hit_length(kv, request(range(9))) == 0


def test_reset_forgets_unused_blocks() -> None:
    kv = make()
    run_once(kv, request(range(8)))
    kv.reset_prefix_cache()
    assert hit_length(kv, request(range(9))) == 0
    assert kv.num_free_blocks == 39


def test_a_sequence_that_starts_again_is_cached_again() -> None:
    kv = make()
    prompt = list(range(9))
    sequence = start(kv, request(prompt))
    kv.store(sequence, prompt, 8)
    kv.free(sequence)
    kv.reset_prefix_cache()
    assert kv.start(sequence, kv.no_prefix(), 9, 0, BlockDeltas())
    kv.store(sequence, prompt, 8)
    assert hit_length(kv, request(prompt)) == 8


def test_eviction_takes_the_ends_of_prompts_first_in_every_group() -> None:
    kv = make(MIXED, num_blocks=1 + 3 * 5)
    prompt = list(range(17))
    run_once(kv, request(prompt))
    start(kv, request(range(100, 107)))  # 6 blocks: the 3 that held no full block, then one of each group
    assert hit_length(kv, request(prompt)) == 12


def test_a_prompt_without_a_cached_start_is_hashed_only_when_there_is_time() -> None:
    kv = make()
    tokens = list(range(39))
    sequence = kv.open(request(tokens))
    assert kv.find_prefix(sequence, tokens).num_tokens == 0
    assert sequence.chain is not None
    assert len(sequence.chain.hashes) == 1
    kv.hash_ahead(sequence, tokens)
    assert len(sequence.chain.hashes) == 9


def test_a_prompt_with_a_cached_start_is_hashed_at_its_arrival() -> None:
    """So that planning a step need not."""
    kv, tokens = make(), list(range(37))
    run_once(kv, request(tokens[:5]))
    chain = kv.open(request(tokens)).chain
    assert chain is not None
    assert len(chain.hashes) == 9


STATES = [LayerKV("full", None, 1), LayerKV("state", bytes_per_row=9)]


def make_states(num_blocks: int = 40, num_states: int = 10) -> KVCacheManager:
    return KVCacheManager(plan_layout(STATES, 4), [num_blocks, num_states])


def test_a_row_has_one_state_and_leaves_a_checkpoint_at_the_end_of_its_prompt() -> None:
    kv = make_states()
    prompt = list(range(18))
    sequence = start(kv, request(prompt))
    assert [bool(block_id) for block_id in ids(sequence, 1)] == [False, False, False, True, True]
    checkpoint = sequence.tables[1][3]
    kv.store(sequence, prompt, 18)
    assert kv.allocate(sequence, 18, 21, 0, BlockDeltas())
    assert checkpoint.ref_count == 1, "the last full entry"
    assert kv.allocate(sequence, 20, 25, 0, BlockDeltas())
    assert checkpoint.ref_count == 0, "the token at 20 reads the state in entry 4"
    assert [bool(block_id) for block_id in ids(sequence, 1)] == [False, False, False, False, True, True, True]
    kv.check_integrity([sequence])
    kv.free(sequence)
    assert kv.num_free_blocks == kv.num_blocks == 39 + 9


def test_a_hit_needs_attention_blocks_and_a_checkpoint() -> None:
    kv = make_states()
    prompt = list(range(18))
    run_once(kv, request(prompt))
    assert hit_length(kv, request(prompt)) == 16
    assert hit_length(kv, request([*prompt, *range(50, 60)])) == 16
    assert hit_length(kv, request(prompt[:14])) == 0, "of the first 12 tokens there is no state"
    sequence = kv.open(request(prompt))
    hit = kv.find_prefix(sequence, prompt)
    deltas = BlockDeltas()
    assert kv.start(sequence, hit, 18, 0, deltas)
    assert [bool(block_id) for block_id in ids(sequence, 1)] == [False, False, False, True, True]
    assert [index for group, index in zip(deltas.groups, deltas.indices, strict=True) if group == 1] == list(range(5))
    kv.check_integrity([sequence])


def test_only_models_with_states_miss_a_state() -> None:
    """What a window has no block of is not there for want of a state."""
    prompt, found = list(range(40)), []
    for kv in (make(MIXED, num_blocks=60), make_states()):
        run_once(kv, request(prompt))
        for group in kv._groups[1:]:
            group.pool.cached[group.index].clear()
        hit = kv.find_prefix(kv.open(request(prompt[:30])), prompt[:30])
        found.append((hit.num_tokens, hit.num_without_state))
    assert found == [(0, 0), (0, 28)]


def test_where_attention_hits_further_a_checkpoint_is_left_for_the_next_one() -> None:
    kv = make_states()
    shared = list(range(13))
    run_once(kv, request([*shared, *range(50, 60)]))
    assert hit_length(kv, request([*shared, 70, 71, 72, 73])) == 0
    run_once(kv, request([*shared, 70, 71, 72, 73]))
    assert hit_length(kv, request([*shared, 80, 81, 82, 83])) == 12


def test_checkpoints_are_evicted_from_a_pool_of_their_own() -> None:
    kv = make_states(num_states=4)
    first, second = list(range(10)), list(range(20, 30))
    run_once(kv, request(first))
    run_once(kv, request(second))
    assert [hit_length(kv, request(tokens)) for tokens in (first, second)] == [8, 8]
    run_once(kv, request(range(40, 50)))
    assert [hit_length(kv, request(tokens)) for tokens in (first, second)] == [0, 8], "the oldest one is gone"
    sequence = kv.open(request(first))
    kv.find_prefix(sequence, first)
    assert sequence.chain is not None
    assert len(kv._groups[0].longest_hit(sequence.chain.hashes, 2)) == 2, "its attention blocks are not"


def test_any_number_of_drafts_may_hold() -> None:
    kv = make_states()
    sequence = start(kv, request(range(6)))
    assert kv.allocate(sequence, 6, 16, 0, BlockDeltas(), drafts=True)
    assert all(ids(sequence, 1)[1:])
    assert kv.allocate(sequence, 9, 17, 0, BlockDeltas())
    assert [bool(block_id) for block_id in ids(sequence, 1)] == [False, True, True, True, True]


def test_the_last_full_state_of_a_row_that_ends_is_what_the_next_turn_goes_on_from() -> None:
    kv = make_states()
    turn = list(range(10))
    sequence = start(kv, request(turn))
    for token in range(10, 23):
        turn.append(token)
        kv.store(sequence, turn, len(turn) - 1)
        assert kv.allocate(sequence, len(turn) - 1, len(turn), 0, BlockDeltas())
    kv.free(sequence)
    assert hit_length(kv, request([*turn, *range(50, 60)])) == 20
    assert hit_length(kv, request([*turn[:12], *range(50, 60)])) == 8, "the end of the first prompt"


def test_the_end_of_the_first_message_is_a_checkpoint() -> None:
    kv = make_states()
    system = [*range(8), 99, 8]
    run_once(kv, request([*system, *range(20, 40)], eos_token_ids=(98, 99)))
    assert hit_length(kv, request([*system, *range(50, 60)])) == 8


def test_the_end_of_the_last_message_is_a_checkpoint() -> None:
    """Behind it the prompt begins the answer, as the next turn may not tell it."""
    kv = make_states()
    asked = [*range(8), 99, *range(10, 19), 99, 19]
    run_once(kv, request([*asked, *range(20, 30)], eos_token_ids=(98, 99)))
    assert hit_length(kv, request([*asked, *range(50, 60)])) == 16


def test_each_pool_must_have_room() -> None:
    kv = make_states(num_blocks=40, num_states=4)
    sequence = start(kv, request(range(6)))
    other = kv.open(request(range(20, 26)))
    assert not kv.start(other, kv.no_prefix(), 6, 1, BlockDeltas())
    assert not kv.fits_now(kv.no_prefix(), 6, 6, 0)
    assert kv.allocate(sequence, 0, 9, 0, BlockDeltas())
    assert not kv.allocate(sequence, 0, 13, 0, BlockDeltas()), "the state at 0 is still read"
    assert kv.allocate(sequence, 8, 13, 0, BlockDeltas())
    assert kv.needed_and_present(100, 100) == (8, 3)
    kv.check_integrity([sequence, other])
