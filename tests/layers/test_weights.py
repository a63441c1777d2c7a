from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quire.layers.weights import (
    Blocks,
    Destination,
    Format,
    WeightMap,
    as_tensor,
    empty_parameter,
    weighted_layers,
)

MAP = WeightMap(
    rename={"input_norm": "attn_norm", "q_norm": "qk_norm.q", "head": "head.projection"},
    stack={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    ignore=("*.inv_freq",),
)
CASES = {
    "model.layers.3.input_norm.weight": Destination("model.layers.3.attn_norm", "weight"),
    "model.layers.3.attn.k_proj.bias": Destination("model.layers.3.attn.qkv_proj", "bias", "k_proj"),
    "model.layers.3.attn.qkv_proj.weight": Destination("model.layers.3.attn.qkv_proj", "weight"),
    "model.layers.3.q_norm.weight": Destination("model.layers.3.qk_norm.q", "weight"),
    "head.weight": Destination("head.projection", "weight"),
    "model.input_norm_2.weight": Destination("model.input_norm_2", "weight"),
}


@pytest.mark.parametrize("name", CASES)
def test_resolve_and_its_inverse(name: str) -> None:
    assert MAP.resolve(name) == CASES[name]
    assert MAP.checkpoint_name(CASES[name]) == name


def test_ignored_names_have_no_destination() -> None:
    assert MAP.resolve("model.rotary.inv_freq") is None
    assert MAP.ignoring("head.*").resolve("head.weight") is None
    assert MAP.resolve("head.weight") is not None, "ignoring makes a new map"


def blocks_of(rows: int, columns: int) -> tuple[Blocks, Tensor]:
    """A made-up format: four values of a block are its two bytes and their negatives."""
    data = np.random.default_rng(rows * columns).integers(0, 100, (rows, columns // 2), dtype=np.uint8)

    def decode(data: np.ndarray) -> Tensor:
        pairs = torch.from_numpy(np.ascontiguousarray(data)).float().unflatten(1, (-1, 2))
        return torch.cat((pairs, -pairs), dim=-1).flatten(1)

    return Blocks(Format("X4", 4, 2), data, decode), decode(data)


@given(st.data())
def test_any_part_of_blocks_has_the_values_of_that_part(data: st.DataObject) -> None:
    blocks, values = blocks_of(data.draw(st.integers(1, 6)), 4 * data.draw(st.integers(1, 5)))
    assert blocks.shape == tuple(values.shape)
    row, column = (data.draw(st.integers(0, size - 1)) for size in values.shape)
    rows, columns = (
        data.draw(st.integers(1, values.shape[0] - row)),
        data.draw(st.integers(1, values.shape[1] - column)),
    )
    part = blocks.rows(row, rows).columns(column, columns)
    assert isinstance(part, Blocks) == (column % 4 == 0 and columns % 4 == 0)
    assert torch.equal(as_tensor(part), values[row : row + rows, column : column + columns])


def test_a_parameter_outside_of_weighted_layers_is_a_mistake() -> None:
    model = nn.Module()
    model.stray = empty_parameter(3, dtype=torch.float32)
    with pytest.raises(AssertionError, match="stray belong to no WeightedLayer"):
        weighted_layers(model)
