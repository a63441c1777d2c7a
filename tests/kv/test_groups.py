from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.kv.block_pool import BlockPool
from quire.kv.groups import Group
from quire.kv.kinds import KINDS
from tests.fakes import FIRST_READ

HASHES = [bytes([index]) for index in range(12)]


def pool_with(present: set[int]) -> BlockPool:
    pool = BlockPool(16, 1)
    for index in sorted(present):
        pool.store(pool.allocate(1)[0], 0, HASHES[index])
    return pool


present_sets = st.sets(st.integers(0, 11))


@given(
    st.sampled_from(list(FIRST_READ)),
    present_sets,
    st.integers(0, 12),
    st.integers(1, 30),
    st.sampled_from([1, 2, 4]),
)
def test_a_hit_is_the_longest_whose_tokens_in_sight_are_present(
    kind: str, present: set[int], limit: int, window: int, block_size: int
) -> None:
    pool = pool_with(present)
    group = Group(0, KINDS.get(kind)(window, block_size), pool)

    def visible(count: int) -> set[int]:
        end = count * block_size
        return {position // block_size for position in range(FIRST_READ[kind](end, window), end)}

    best = max(count for count in range(limit + 1) if visible(count) <= present)
    blocks = group.longest_hit(HASHES, limit)
    assert len(blocks) == best
    assert {index for index, block in enumerate(blocks) if block.id} == visible(best)
    assert all(block is pool.cached[0][HASHES[index]] for index, block in enumerate(blocks) if block.id)
    assert best == 0 or not visible(best) or group.may_begin(HASHES[0])


@given(present_sets, st.integers(0, 12), st.sampled_from([1, 2, 4]))
def test_a_hit_of_states_is_the_last_checkpoint(present: set[int], limit: int, block_size: int) -> None:
    pool = pool_with(present)
    blocks = Group(0, KINDS.get("state")(None, block_size), pool).longest_hit(HASHES, limit)
    assert len(blocks) == max((index + 1 for index in present if index < limit), default=0)
    assert [block.id for block in blocks[:-1]] == [0] * (len(blocks) - 1)
    assert not blocks or blocks[-1] is pool.cached[0][HASHES[len(blocks) - 1]]


def test_states_take_blocks_for_marks_and_the_end_alone() -> None:
    group = Group(0, KINDS.get("state")(None, 4), BlockPool(9, 1))
    assert [bool(block.id) for block in group.extend(2, 8, (-1, 3, 3, 9))] == [False, True, False, False, True, True]
    assert group.num_new(2, 8, (3, 7)) == 3
    assert group.num_new(7, 8, ()) == 1
    assert group.num_new(5, 5, (5,)) == 0
    assert group.pool.num_free == 5
