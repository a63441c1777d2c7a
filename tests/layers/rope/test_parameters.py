from __future__ import annotations

from typing import Any

import pytest

from quire.layers.rope.parameters import context_length, rope_parameters
from quire.types.errors import ModelError

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BASE: dict[str, Any] = {"max_position_embeddings": 131072}


def test_old_and_new_spelling_mean_the_same() -> None:
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    assert rope_parameters(old, 64) == rope_parameters(new, 64)
    assert rope_parameters(new, 64).theta == 5e5


def test_absent_and_null_scaling_is_the_default_type() -> None:
    for config in (BASE, {**BASE, "rope_scaling": None, "rope_parameters": None}):
        rope = rope_parameters(config, 64)
        assert (rope.rope_type, rope.theta, rope.rotary_dim) == ("default", 10_000.0, 64)


def test_gemma3_layers_of_each_type_have_their_own_base() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {**BASE, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    new = {
        **BASE,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **scaling},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }
    for kind, theta, rope_type in (("full_attention", 1e6, "linear"), ("sliding_attention", 1e4, "default")):
        rope = rope_parameters(old, 256, kind)
        assert rope == rope_parameters(new, 256, kind)
        assert (rope.theta, rope.rope_type) == (theta, rope_type)


def test_partial_rotary_factor_in_either_place() -> None:
    for config in (
        {**BASE, "partial_rotary_factor": 0.75},
        {**BASE, "rope_parameters": {"partial_rotary_factor": 0.75}},
    ):
        assert rope_parameters(config, 128).rotary_dim == 96


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_early_names_of_longrope(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 4, "long_factor": [2] * 4}
    rope = rope_parameters({**BASE, "rope_scaling": scaling, "original_max_position_embeddings": 4096}, 8)
    assert (rope.rope_type, rope.long_factor) == ("longrope", (2.0,) * 4)
    assert rope.original_max_position_embeddings == 4096


def test_a_layer_type_without_parameters_is_refused() -> None:
    config = {**BASE, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    with pytest.raises(ModelError, match=r"no entry for 'sliding_attention'; it has: full_attention"):
        rope_parameters(config, 64, "sliding_attention")


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1000}, 8000),
        ({"rope_type": "llama3", **LLAMA3}, 1000),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 32.0}, 1000),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, 1000),
    ],
)
def test_context_length_includes_scaling(rope: dict[str, Any], expected: int) -> None:
    assert context_length({"max_position_embeddings": 1000, "rope_scaling": rope}) == expected
