"""Frequencies against transformers' own functions, for many parameter sets; parity of whole models is elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.layers.rope.frequencies import ROPE_TYPES
from quire.layers.rope.parameters import RopeParameters, rope_parameters
from quire.types.errors import ModelError, UnknownNameError


def compare(rope: dict[str, Any], max_positions: int, max_model_len: int, slack: float = 0.0) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": 10_000.0, **rope},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=max_model_len)
    ours = rope_parameters(config.to_dict(), 32)
    frequencies, our_factor = ROPE_TYPES.get(ours.rope_type)(ours, max_model_len)
    torch.testing.assert_close(frequencies, expected, atol=0, rtol=4e-6 + slack)
    assert our_factor == pytest.approx(factor, rel=1e-12)


lengths = st.integers(16, 100_000)
factors = st.floats(1.0, 40.0)


@given(lengths, lengths, factors)
def test_linear_and_dynamic(max_positions: int, max_model_len: int, factor: float) -> None:
    compare({"rope_type": "linear", "factor": factor}, max_positions, max_model_len)
    compare({"rope_type": "dynamic", "factor": factor}, max_positions, max_model_len)


@given(lengths, factors, st.floats(0.5, 2.0), st.floats(2.5, 8.0))
def test_llama3(original: int, factor: float, low: float, high: float) -> None:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    # Where frequencies begin to be divided less, a rounding of wavelengths is this many times as much in them.
    slack = 4e-7 * factor * high / (high - low)
    compare({**rope, "original_max_position_embeddings": original}, original * 8, 100, slack)


@given(
    lengths,
    factors,
    st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "truncate": st.booleans(),
        },
    ),
)
def test_yarn(original: int, factor: float, options: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **options}
    compare(rope, int(original * factor), 100)


@given(lengths, lengths, st.lists(st.floats(1.0, 60.0), min_size=16, max_size=16), st.none() | st.floats(0.5, 2.0))
def test_longrope(original: int, max_model_len: int, long: list[float], attention_factor: float | None) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": long}
    if attention_factor is not None:
        rope["attention_factor"] = attention_factor
    compare({**rope, "original_max_position_embeddings": original}, original * 4, max_model_len)


def test_a_missing_value_is_named() -> None:
    rope = RopeParameters(rotary_dim=16, theta=1e4, max_position_embeddings=64, rope_type="linear")
    with pytest.raises(ModelError, match="rope type 'linear' needs 'factor'"):
        ROPE_TYPES.get("linear")(rope, 64)


def test_a_factor_list_of_the_wrong_length_is_named() -> None:
    rope = RopeParameters(
        rotary_dim=16,
        theta=1e4,
        max_position_embeddings=64,
        rope_type="longrope",
        original_max_position_embeddings=32,
        short_factor=(1.0,) * 8,
        long_factor=(1.0,) * 7,
    )
    with pytest.raises(ModelError, match="long_factor has 7 values; rotary dimension 16"):
        ROPE_TYPES.get("longrope")(rope, 64)


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown rope type 'spiral'.*longrope"):
        ROPE_TYPES.get("spiral")
