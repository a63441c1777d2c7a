from __future__ import annotations

import pytest
import torch

from quire.layers.activation import gated_activation, gated_matmul
from quire.layers.linear import MergedColumnParallelLinear
from quire.ops.activation import gelu_tanh_and_mul, silu_and_mul
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ModelError
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton


def test_names_of_model_configs() -> None:
    assert gated_activation("silu", Target("elsewhere")) is silu_and_mul
    assert gated_activation("gelu_pytorch_tanh", Target("elsewhere")) is gelu_tanh_and_mul


def test_an_unknown_activation_is_named_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'relu6'.*gelu_pytorch_tanh, silu"):
        gated_activation("relu6", Target())


@needs_triton
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_a_matmul_and_its_gates_at_once(name: str, rows: int) -> None:
    target = Target("cuda")
    with torch.device(DEVICE):
        linear = MergedColumnParallelLinear(
            40, {"gate_proj": 24, "up_proj": 24}, bias=True, target=target, group=ParallelGroup()
        ).allocate()
        for parameter in linear.parameters():
            parameter.data.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        x = torch.randn(rows, 40, generator=torch.Generator(DEVICE).manual_seed(1))
    at_once = gated_matmul(linear, name, target)(x)
    one_by_one = gated_activation(name, target)(linear(x))
    torch.testing.assert_close(at_once, one_by_one, atol=1e-4, rtol=1e-4)
