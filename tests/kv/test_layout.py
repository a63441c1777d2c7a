from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.layout import LayerKV, plan_layout
from quire.types.errors import ConfigError


def test_uniform_model_is_one_group_of_all_layers() -> None:
    layout = plan_layout([LayerKV("full", None, 64)] * 30, 16)
    assert [group.layers for group in layout.groups] == [tuple(range(30))]
    assert (layout.num_slots, layout.page_bytes) == (30, 30 * 16 * 64)


def test_mixed_model_is_cut_into_groups_of_the_rarer_kind() -> None:
    layers = [LayerKV("full" if i % 6 == 5 else "sliding", None if i % 6 == 5 else 512, 64) for i in range(26)]
    layout = plan_layout(layers, 16)
    assert layout.num_slots == 4
    assert [(group.kind, len(group.layers)) for group in layout.groups] == [
        ("full", 4),
        *[("sliding", 4)] * 5,
        ("sliding", 2),
    ]
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(26))
    assert [group.index for group in layout.groups] == list(range(7))


def test_different_sizes_use_the_largest() -> None:
    assert plan_layout([LayerKV("full", None, 64), LayerKV("sliding", 8, 128)], 4).page_bytes == 4 * 128


def test_two_windows_are_two_kinds() -> None:
    layout = plan_layout([LayerKV("sliding", 8, 1), LayerKV("sliding", 16, 1), LayerKV("sliding", 8, 1)], 4)
    assert [(group.window, group.layers) for group in layout.groups] == [(8, (0,)), (8, (2,)), (16, (1,))]


def test_bad_layers_are_refused() -> None:
    for layers in ([], [LayerKV("sliding", None, 1)], [LayerKV("full", 3, 1)], [LayerKV("sliding", 0, 1)]):
        with pytest.raises(ConfigError, match="layer"):
            plan_layout(layers, 16)


@given(
    window=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_tokens=st.integers(1, 120),
    step_tokens=st.integers(1, 50),
    data=st.data(),
)
def test_blocks_for_bounds_every_chunking(
    window: int, block_size: int, num_tokens: int, step_tokens: int, data: st.DataObject
) -> None:
    """Whatever the chunks, no step touches more blocks than the bound."""
    layout = plan_layout([LayerKV("sliding", window, 1)], block_size)
    bound = layout.blocks_for(num_tokens, step_tokens)
    computed = 0
    while computed < num_tokens:
        end = min(num_tokens, computed + data.draw(st.integers(1, step_tokens)))
        first = max(0, computed - window + 1) // block_size
        assert -(-end // block_size) - first <= bound
        computed = end
    full = plan_layout([LayerKV("full", None, 1)], block_size)
    assert bound <= full.blocks_for(num_tokens, step_tokens) == -(-num_tokens // block_size)
