"""Quantization inside norms and activations: the bits of the two passes it replaces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, HALF, NATIVE
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
SHAPES = [(1, 64), (3, 200), (2, 1024)]
MANY = [(64, 40), (70, 64), (1, 64)]  # from 64 lines on an activation takes one pass


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(rows: int, width: int, offset: float) -> None:
    from quire.kernels.triton.norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
    from quire.kernels.triton.quantize import quantize_rows

    x, residual, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
    kind = (weight, 1e-6, offset)
    assert_equal(rms_norm_fp8(x, *kind), quantize_rows(rms_norm(x, *kind)))
    normed, total = add_rms_norm(x, residual, *kind)
    assert_equal(add_rms_norm_fp8(x, residual, *kind), (*quantize_rows(normed), total))


@pytest.mark.parametrize(("rows", "width"), MANY)
def test_activations(rows: int, width: int) -> None:
    from quire.kernels.triton import activation
    from quire.kernels.triton.quantize import quantize_rows

    gate_up = random(rows, 2 * width + 16)[:, : 2 * width] * 4.0
    assert_equal(activation.silu_and_mul_fp8(gate_up), quantize_rows(activation.silu_and_mul(gate_up)))
    assert_equal(activation.gelu_tanh_and_mul_fp8(gate_up), quantize_rows(activation.gelu_tanh_and_mul(gate_up)))


def test_lines_of_zeros_and_what_is_not_a_number() -> None:
    from quire.kernels.triton.activation import silu_and_mul_fp8
    from quire.kernels.triton.norm import rms_norm_fp8

    x = random(3, 64)
    x[0] = 0.0
    x[1, 5] = torch.nan
    for values, scale in (rms_norm_fp8(x, random(64), 1e-6), silu_and_mul_fp8(x.repeat(22, 1))):
        assert bool((values[0].float() == 0.0).all())
        assert not NATIVE or bool(values[1].float().isnan().any()), "the interpreter rounds it to a number"
        assert bool(values[2].float().isfinite().all())
        assert bool(scale[[0, 2]].isfinite().all())
