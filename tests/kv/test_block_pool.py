from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.kv.block_pool import Block, BlockPool
from quire.types.errors import ConfigError
from tests.kv.recorder import Recorder


def ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, 1)
    assert sorted(ids(pool.allocate(3))) == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)
    pool.release([pool.null_block])
    pool.touch([pool.null_block])
    pool.check_integrity()


def test_too_small_a_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 1"):
        BlockPool(1, 1)


def test_cached_blocks_are_evicted_least_recently_used_first_and_empty_ones_before_them() -> None:
    events = Recorder()
    pool = BlockPool(6, 1, [events])
    a, b, c, d, e = pool.allocate(5)
    for block, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.store(block, 0, name)
    pool.release([c, b, a])  # a prompt: its end is released first
    pool.release([d, e])
    assert set(ids(pool.allocate(2))) == {d.id, e.id}, "blocks that hold nothing go first"
    assert pool.allocate(1) == [c]
    pool.touch([b])
    pool.release([b])
    assert pool.allocate(2) == [a, b], "using b made it the most recent"
    assert [event.block_hash for event in events.events if not event.is_cached] == [b"c", b"a", b"b"]
    pool.check_integrity()


def test_freed_blocks_are_handed_out_before_untouched_ones() -> None:
    """Memory that no block was ever written to is not taken while another block will do."""
    pool = BlockPool(100, 2)
    for _ in range(50):
        first, second = pool.allocate(2)
        assert {first.id, second.id} == {1, 2}
        pool.release([second, first])
    for index, block in enumerate(blocks := pool.allocate(4)):
        pool.store(block, index % 2, str(index).encode())
    pool.release(reversed(blocks))
    assert ids(pool.allocate(1)) == [5], "what is cached is worth more than an untouched page"
    pool.forget_free()
    pool.check_integrity()
    assert set(ids(pool.allocate(4))) == {1, 2, 3, 4}, "what was forgotten is worth less"


def test_equal_content_is_stored_once() -> None:
    pool = BlockPool(3, 2)
    first, second = pool.allocate(2)
    pool.store(first, 0, b"x")
    pool.store(second, 0, b"x")
    assert pool.cached[0] == {b"x": first}
    pool.store(second, 1, b"x")
    assert pool.cached[1] == {b"x": second}, "groups do not share"
    pool.check_integrity()


def test_forget_free_keeps_what_is_in_use() -> None:
    pool = BlockPool(3, 1)
    used, free = pool.allocate(2)
    pool.store(used, 0, b"used")
    pool.store(free, 0, b"free")
    pool.release([free])
    pool.forget_free()
    assert list(pool.cached[0]) == [b"used"]
    pool.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, block: setattr(block, "ref_count", 0),
        lambda pool, block: setattr(pool, "num_free", pool.num_free - 1),
        lambda pool, block: pool.cached[0].clear(),
        lambda pool, block: setattr(block, "block_hash", None),
        lambda pool, block: setattr(pool._ring.next_free, "prev_free", block),
    ],
)
def test_integrity_check_sees_damage(damage: Callable[[BlockPool, Block], None]) -> None:
    pool = BlockPool(5, 1)
    block = pool.allocate(1)[0]
    pool.store(block, 0, b"x")
    pool.check_integrity()
    damage(pool, block)
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolTrace(RuleBasedStateMachine):
    """Any trace of calls keeps the pool equal to a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.events = Recorder()
        self.pool = BlockPool(8, 2, [self.events])
        self.held: list[list[Block]] = []
        self.next_name = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            assert len(set(ids(blocks))) == count
            assert all(block.ref_count == 1 and block.block_hash is None for block in blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(reversed(blocks))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), group=st.integers(0, 1))
    def store(self, data: st.DataObject, group: int) -> None:
        block = data.draw(st.sampled_from([block for blocks in self.held for block in blocks]))
        if block.block_hash is None:
            self.next_name += 1
            self.pool.store(block, group, str(self.next_name).encode())

    @precondition(lambda self: any(self.pool.cached))
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for cached in self.pool.cached for b in cached.values()]))
        self.pool.touch([block])
        self.held.append([block])

    @rule()
    def forget(self) -> None:
        self.pool.forget_free()

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity()
        uses = [0] * 8
        for blocks in self.held:
            for block in blocks:
                uses[block.id] += 1
        assert [block.ref_count for block in self.pool.blocks] == uses
        found = set()
        for event in self.events.events:
            (found.add if event.is_cached else found.remove)((event.group, event.block_hash))
        assert found == {(group, name) for group in (0, 1) for name in self.pool.cached[group]}


PoolTrace.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolTrace = PoolTrace.TestCase
