from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.layout import KVPool, plan_layout
from quire.types.cache import KVForm, LayerKV
from quire.types.errors import ConfigError, UnknownNameError
from tests.fakes import FIRST_READ


def test_uniform_model_is_one_group_of_all_layers() -> None:
    layout = plan_layout([LayerKV("full", None, 64)] * 30, 16)
    assert [group.layers for group in layout.groups] == [tuple(range(30))]
    assert layout.pools == (KVPool((16 * 64,) * 30),)
    assert layout.page_bytes == 30 * 16 * 64


def test_mixed_model_is_cut_into_groups_of_the_rarer_kind() -> None:
    layers = [LayerKV("full" if i % 6 == 5 else "sliding", None if i % 6 == 5 else 512, 64) for i in range(26)]
    layout = plan_layout(layers, 16)
    assert [len(pool.slots) for pool in layout.pools] == [4]
    assert [(group.kind, len(group.layers)) for group in layout.groups] == [
        ("full", 4),
        *[("sliding", 4)] * 5,
        ("sliding", 2),
    ]
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(26))
    assert [group.index for group in layout.groups] == list(range(7))


def test_layers_of_different_sizes_or_forms_have_pools_of_their_own() -> None:
    wide, tall = (LayerKV("full", None, 64, form=KVForm(heads, 32 // heads)) for heads in (1, 2))
    small = LayerKV("sliding", 8, 16)
    state = LayerKV("state", bytes_per_row=1000)
    layout = plan_layout([state, small, wide, tall, small, small, wide, state], 4)
    assert layout.pools == (KVPool((256,) * 2), KVPool((256,)), KVPool((64,) * 3), KVPool((1000,) * 2, per_row=True))
    assert [(group.kind, group.layers, group.pool) for group in layout.groups] == [
        ("full", (2, 6), 0),
        ("full", (3,), 1),
        ("sliding", (1, 4, 5), 2),
        ("state", (0, 7), 3),
    ]
    assert layout.page_bytes == 512 + 256 + 192 + 2000


def test_latents_with_and_without_index_keys_are_one_group() -> None:
    full, shared = (LayerKV("latent", None, 64 + dim, form=KVForm(1, 64, 32, dim)) for dim in (16, 0))
    layout = plan_layout([full, shared, shared, full], 4)
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3)]
    assert layout.pools == (KVPool((320, 256, 256, 320)),)
    assert layout.part([1, 2, 3]).pools == (KVPool((256, 256, 320)),)


@given(
    num_tokens=st.integers(1, 200),
    step_tokens=st.integers(1, 50),
    more=st.integers(0, 1 << 20),
    window=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=3, unique=True),
)
def test_pools_share_the_memory_so_that_a_request_that_fits_can_run(
    num_tokens: int, step_tokens: int, more: int, window: int, sizes: list[int]
) -> None:
    layers = [LayerKV("full", None, sizes[0]), *(LayerKV("sliding", window, size) for size in sizes)]
    layout = plan_layout([*layers, LayerKV("state", bytes_per_row=333)], 4)
    memory = layout.bytes_for(num_tokens, step_tokens) + more
    counts = layout.num_blocks_for(memory, num_tokens, step_tokens)
    assert layout.num_bytes(counts) <= memory
    needed = layout.blocks_for(num_tokens, step_tokens)
    assert all(count > least for count, least in zip(counts, needed, strict=True))
    # No pool of tokens is left with memory for another request when the others are full.
    of_tokens = [pair for *pair, pool in zip(counts, needed, layout.pools, strict=True) if not pool.per_row]
    shares = [(count - 1) / least for count, least in of_tokens]
    assert max(shares) - min(shares) <= max(1 / least for _, least in of_tokens)


def test_states_get_what_rows_hold_and_what_checkpoints_are_given() -> None:
    layout = plan_layout([LayerKV("full", None, 1), LayerKV("state", bytes_per_row=1000)], 4)
    one = layout.bytes_for(100, 100)
    least = layout.num_blocks_for(one, 100, 100, num_rows=8)
    assert least == (26, 9), "a request of 100 tokens, and the null blocks"
    assert layout.num_blocks_for(one + 100_000, 100, 100, num_rows=8, checkpoints=30_000)[1] == 9 + 7 * 2 + 30
    assert layout.num_blocks_for(one + 100_000, 100, 100, num_rows=8)[1] == 9 + 7 * 2 + 25
    assert layout.num_blocks_for(one + 100_000, 100, 100, num_rows=900, checkpoints=0)[1] == 9 + 50, "at most a half"
    assert layout.num_blocks_for(one + 9_000, 100, 100, checkpoints=10**9) == (26, 9 + 9)


@given(
    rows=st.integers(1, 300),
    num_tokens=st.integers(1, 200),
    has_tokens=st.booleans(),
    checkpoints=st.none() | st.integers(0, 10_000),
    more=st.integers(0, 1_000_000),
)
def test_a_number_of_rows_that_is_lowered_to_what_fits_does_fit(
    rows: int, num_tokens: int, has_tokens: bool, checkpoints: int | None, more: int
) -> None:
    layers = [LayerKV("full", None, 7)] * has_tokens
    layout = plan_layout([*layers, LayerKV("state", bytes_per_row=333), LayerKV("state", bytes_per_row=100)], 4)
    memory, sizes = layout.bytes_for(num_tokens, 50) + more, (num_tokens, 50)
    blocks = layout.num_blocks_for(memory, *sizes, rows, checkpoints)
    fits = layout.num_rows(blocks, *sizes)
    assert fits >= 1
    assert fits >= rows or more < 2 * rows * 2 * 433, "states get half of the memory"
    lowered = min(rows, fits)
    assert layout.num_rows(layout.num_blocks_for(memory, *sizes, lowered, checkpoints), *sizes) >= lowered


def test_models_without_states_have_no_bound_on_rows() -> None:
    assert plan_layout([LayerKV("full", None, 1)], 4).num_rows((10,), 8, 8) > 1 << 40


def test_a_layer_has_its_share_of_the_blocks_of_its_pool() -> None:
    window = [LayerKV("sliding", 32, 64)] * 4
    layout = plan_layout([*window, *[LayerKV("full", None, 64)] * 2, LayerKV("state", bytes_per_row=4096)], 16)
    (tokens, states), found = layout.blocks_for(512, 64), layout.layer_bytes(512, 64)
    assert found == {**dict.fromkeys(range(6), tokens * 2 * 16 * 64 // 6), 6: states * 4096}


def test_two_windows_are_two_kinds() -> None:
    layout = plan_layout([LayerKV("sliding", 8, 1), LayerKV("sliding", 16, 1), LayerKV("sliding", 8, 1)], 4)
    assert [(group.window, group.layers) for group in layout.groups] == [(8, (0,)), (8, (2,)), (16, (1,))]


def test_bad_layers_are_refused() -> None:
    wrong = [("sliding", None), ("full", 3), ("sliding", 0), ("chunked", None), ("state", 3)]
    for layers in ([], [LayerKV("full")], *([LayerKV(kind, window, 1)] for kind, window in wrong)):
        with pytest.raises(ConfigError, match="layer"):
            plan_layout(layers, 16)
    with pytest.raises(UnknownNameError, match="full"):
        plan_layout([LayerKV("fulll", None, 1)], 16)


@given(
    kind=st.sampled_from(["sliding", "chunked"]),
    window=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_tokens=st.integers(1, 120),
    step_tokens=st.integers(1, 50),
    data=st.data(),
)
def test_blocks_for_bounds_every_chunking(
    kind: str, window: int, block_size: int, num_tokens: int, step_tokens: int, data: st.DataObject
) -> None:
    """Whatever the chunks, no step touches more blocks than the bound."""
    layout = plan_layout([LayerKV(kind, window, 1)], block_size)
    (bound,) = layout.blocks_for(num_tokens, step_tokens)
    computed = 0
    while computed < num_tokens:
        end = min(num_tokens, computed + data.draw(st.integers(1, step_tokens)))
        first = FIRST_READ[kind](computed, window) // block_size
        assert -(-end // block_size) - first <= bound
        computed = end
    full = plan_layout([LayerKV("full", None, 1)], block_size)
    assert (bound,) <= full.blocks_for(num_tokens, step_tokens) == (-(-num_tokens // block_size),)
