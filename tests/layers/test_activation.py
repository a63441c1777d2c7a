from __future__ import annotations

import pytest

from quire.layers.activation import gated_activation
from quire.ops.activation import gelu_tanh_and_mul, silu_and_mul
from quire.ops.base import Target
from quire.types.errors import ModelError


def test_names_of_model_configs() -> None:
    assert gated_activation("silu", Target("elsewhere")) is silu_and_mul
    assert gated_activation("gelu_pytorch_tanh", Target("elsewhere")) is gelu_tanh_and_mul


def test_an_unknown_activation_is_named_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'relu6'.*gelu_pytorch_tanh, silu"):
        gated_activation("relu6", Target())
