from __future__ import annotations

import pytest
import torch

from quire.ops.norm import rms_norm
from tests.ops.inputs.norm import generate_inputs
from tests.ops.rows import assert_rows_independent


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_equals_its_formula_in_float64(seed: int, offset: float) -> None:
    x, weight, eps = generate_inputs(seed)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    torch.testing.assert_close(rms_norm(x, weight, eps, offset), expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)  # squares overflow float16
    weight = torch.ones(64, dtype=dtype)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert torch.equal(out, rms_norm(x.float(), weight.float(), 1e-6).to(dtype))


@pytest.mark.parametrize("width", [16, 17, 576, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=generator).to(dtype)
    assert_rows_independent(
        lambda x: rms_norm(x, weight, 1e-5, 1.0), lambda n: torch.randn(n, width, generator=generator).to(dtype)
    )


def test_head_norm_of_a_strided_view_is_row_independent() -> None:
    generator, weight = torch.Generator().manual_seed(0), torch.ones(24)
    assert_rows_independent(
        lambda x: rms_norm(x[:, 1:4], weight, 1e-5), lambda n: torch.randn(n, 5, 24, generator=generator)
    )
