"""Products of few rows with a weight, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import assert_close, needs_triton

pytestmark = needs_triton


def make(rows: int, inner: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inner + outputs)
    shapes = ((rows, inner), (outputs, inner), (outputs,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def expect(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().t()
    return (product if bias is None else product + bias.double()).float()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inner", "outputs"), [(1, 1), (128, 4), (300, 77), (129, 5)])
def test_one_row(inner: int, outputs: int, with_bias: bool) -> None:
    from quire.kernels.triton.matmul import matmul_one_row

    x, weight, bias = make(1, inner, outputs)
    given = bias.to(DEVICE) if with_bias else None
    out = matmul_one_row(x.to(DEVICE), weight.to(DEVICE), given, rows=4, cols=128)
    assert_close(out, expect(x, weight, bias if with_bias else None), 1e-4)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(("rows", "inner", "outputs"), [(3, 300, 77), (16, 64, 16), (20, 33, 5), (2, 257, 33)])
def test_few_rows(rows: int, inner: int, outputs: int, splits: int) -> None:
    """More splits than pieces of the inner dimension leave some programs without work; the sum is whole anyway."""
    from quire.kernels.triton.matmul import matmul_few_rows

    x, weight, bias = make(rows, inner, outputs)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for given in (None, bias):
        placed = None if given is None else given.to(DEVICE)
        out = matmul_few_rows(x.to(DEVICE), weight.to(DEVICE), counters, placed, splits=splits, bn=16, bk=32)
        assert_close(out, expect(x, weight, given), 1e-4)
        assert not bool(counters.any()), "the next launch counts from zero"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1032), (2, 1032), (17, 1032), (65, 1032), (5, 64)])
def test_whatever_way_is_chosen(rows: int, inner: int, dtype: torch.dtype) -> None:
    from quire.kernels.triton.matmul import linear_transposed

    x, weight, bias = make(rows, inner, 70, dtype)
    out = linear_transposed(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE))
    assert out.dtype == dtype
    expected = expect(x, weight, bias)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert_close(out / inner**0.5, expected / inner**0.5, tolerance)
