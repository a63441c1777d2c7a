from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.layers.weights import Destination, WeightMap, empty_parameter, weighted_layers

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


EXPERTS = WeightMap(
    stack={
        "gate_up_proj": ("gate_proj", "up_proj", "{i}.gate_proj", "{i}.up_proj"),
        "down_proj": ("{i}.down_proj",),
    }
)
NUMBERED = {
    "mlp.experts.12.up_proj.weight": Destination("mlp.experts.gate_up_proj", "weight", "12.up_proj"),
    "mlp.experts.0.down_proj.weight": Destination("mlp.experts.down_proj", "weight", "0.down_proj"),
    "mlp.shared.up_proj.weight": Destination("mlp.shared.gate_up_proj", "weight", "up_proj"),
    "mlp.shared.down_proj.weight": Destination("mlp.shared.down_proj", "weight"),
    "mlp.experts.gate_up_proj.weight": Destination("mlp.experts.gate_up_proj", "weight"),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_pieces_may_be_numbered(name: str) -> None:
    assert EXPERTS.resolve(name) == NUMBERED[name]
    assert EXPERTS.checkpoint_name(NUMBERED[name]) == name


def test_ignored_names_have_no_destination() -> None:
    assert MAP.resolve("model.rotary.inv_freq") is None
    assert MAP.ignoring("head.*").resolve("head.weight") is None
    assert MAP.resolve("head.weight") is not None, "ignoring makes a new map"


def test_a_parameter_outside_of_weighted_layers_is_a_mistake() -> None:
    model = nn.Module()
    model.stray = empty_parameter(3, dtype=torch.float32)
    with pytest.raises(AssertionError, match="stray belong to no WeightedLayer"):
        weighted_layers(model)
