from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.kv.block_pool import BlockPool
from quire.kv.groups import FullGroup, SlidingGroup
from quire.kv.layout import KVGroup

HASHES = [bytes([index]) for index in range(12)]


def pool_with(present: set[int]) -> BlockPool:
    pool = BlockPool(16, 1)
    for index in sorted(present):
        pool.store(pool.allocate(1)[0], 0, HASHES[index])
    return pool


present_sets = st.sets(st.integers(0, 11))


@given(present_sets, st.integers(0, 12))
def test_full_hit_is_the_unbroken_prefix(present: set[int], limit: int) -> None:
    pool = pool_with(present)
    found = FullGroup(KVGroup(0, "full", None, (0,)), pool).find(HASHES, limit)
    count = next((i for i in range(limit) if i not in present), limit)
    assert found == [pool.cached[0][HASHES[i]] for i in range(count)]


@given(present_sets, st.integers(0, 12), st.integers(1, 30), st.sampled_from([1, 2, 4]))
def test_sliding_hit_is_the_longest_whose_window_is_present(
    present: set[int], limit: int, window: int, block_size: int
) -> None:
    pool = pool_with(present)
    group = SlidingGroup(KVGroup(0, "sliding", window, (0,)), pool, block_size)

    def visible(count: int) -> set[int]:
        end = count * block_size
        return {position // block_size for position in range(max(0, end - window + 1), end)}

    best = max(count for count in range(limit + 1) if visible(count) <= present)
    assert group.longest_hit(HASHES, limit) == best
    blocks = group.hit_blocks(HASHES, best)
    assert len(blocks) == best
    assert {index for index, block in enumerate(blocks) if block.id} == visible(best)
