"""Matmuls in eight-bit floats: how far they are from exact ones, and lines that quantization must not break."""

from __future__ import annotations

import pytest
import torch

from quire.ops.fp8 import FP8, FP8_MAX, linear_fp8, quantize_rows


@pytest.mark.parametrize("inner", [64, 1024, 4096])
def test_the_error_is_bounded(inner: int) -> None:
    """Each side is rounded to four significant bits: at most 1/16 off, on average 2 to 3 %."""
    generator = torch.Generator().manual_seed(inner)
    x, weight = (torch.randn(n, inner, generator=generator) for n in (16, 128))
    exact = x.double() @ weight.double().t()
    error = float((linear_fp8(x, *quantize_rows(weight)).double() - exact).norm() / exact.norm())
    assert 0.005 < error < 0.045


def test_lines_have_scales_of_their_own() -> None:
    x = torch.tensor([[1e-4, -5e-5], [1e4, 1.0], [0.0, 0.0]])
    lines, scale = quantize_rows(x)
    assert lines.dtype == FP8
    assert float(lines[0, 0]) == FP8_MAX == float(lines[1, 0])
    assert bool((lines[2].float() == 0).all())
    torch.testing.assert_close(lines.float() * scale[:, None], x, rtol=1 / 16, atol=1e-9 + 0.02)


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    out = linear_fp8(x, *quantize_rows(torch.eye(2)))
    assert bool(out[0].isnan().any())
    assert not bool(out[1].isnan().any())
