from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import gelu_tanh_and_mul, silu_and_mul
from tests.ops.inputs.activation import generate_inputs
from tests.ops.rows import assert_rows_independent

REFERENCES: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    silu_and_mul: F.silu,
    gelu_tanh_and_mul: lambda x: F.gelu(x, approximate="tanh"),
}
BOTH = pytest.mark.parametrize("op", REFERENCES, ids=lambda op: op.__name__)


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_equals_torch_in_float64(op: Callable[[Tensor], Tensor], seed: int) -> None:
    (x,) = generate_inputs(seed)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(op(x), (REFERENCES[op](gate) * up).float(), atol=1e-5, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_values_reach_their_limits(op: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -200.0, -89.0, 0.0, 200.0, 1e4], dtype=dtype)
    out = op(torch.cat((gate, torch.ones(6, dtype=dtype))).unsqueeze(0))[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), gate.float().clamp(min=0.0), atol=1e-30, rtol=0)


@BOTH
@pytest.mark.parametrize("width", [1, 7, 96, 1537])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(op: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    assert_rows_independent(op, lambda n: (torch.randn(n, 2 * width, generator=generator) * 4).to(dtype))
