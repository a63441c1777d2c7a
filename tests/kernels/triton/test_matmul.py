"""Matmuls of few rows with a weight, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.split_k import sum_of
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import assert_close, needs_triton

pytestmark = needs_triton


def make(rows: int, inner: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inner + outputs)
    shapes = ((rows, inner), (outputs, inner), (outputs,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def expect(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    matmul = x.double() @ weight.double().t()
    return (matmul if bias is None else matmul + bias.double()).float()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inner", "outputs"), [(1, 1), (128, 4), (300, 77), (129, 5)])
def test_one_row(inner: int, outputs: int, with_bias: bool) -> None:
    from quire.kernels.triton.matmul import matmul_one_row

    x, weight, bias = make(1, inner, outputs)
    given = bias.to(DEVICE) if with_bias else None
    out = matmul_one_row(x.to(DEVICE), weight.to(DEVICE), given, rows=4, cols=128)
    assert_close(out, expect(x, weight, bias if with_bias else None), 1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("inner", "outputs"), [(1, 1), (300, 77), (129, 5)])
def test_one_row_and_its_gates(inner: int, outputs: int, activation: str) -> None:
    from quire.kernels.triton.matmul import matmul_one_row

    x, weight, bias = make(1, inner, 2 * outputs)
    placed = [tensor.to(DEVICE) for tensor in (x, weight, bias)]
    out = matmul_one_row(*placed, rows=4, cols=128, activation=activation)
    assert_close(out, ACTIVATIONS[activation](expect(x, weight, bias)), 1e-3)


# 1,152 is enough for tiles, and whole pieces; 1,032 is not.
WAYS = [(1, 1152), (2, 1152), (17, 1152), (65, 1152), (130, 1152), (17, 1032), (5, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "inner"), WAYS)
def test_whatever_way_is_chosen(rows: int, inner: int, dtype: torch.dtype) -> None:
    from quire.kernels.triton.matmul import linear_transposed

    x, weight, bias = make(rows, inner, 70, dtype)
    out = linear_transposed(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE))
    assert out.dtype == dtype
    expected = expect(x, weight, bias)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert_close(out / inner**0.5, expected / inner**0.5, tolerance)


# Few rows of any weight, some rows of a small one, of a large one, too many for parts; too short.
PARTS = [(1, 1152, 70, 1), (16, 1152, 70, 8), (64, 1152, 600, 8), (100, 1152, 70, 8), (5, 64, 70, 1)]
LARGE_PARTS = [
    (64, 4224, 2100, 3),
    (70, 4224, 2100, 3),
    (96, 4224, 2100, 3),
    (150, 4224, 2100, 3),
    (193, 4224, 2100, 1),
]


@pytest.mark.parametrize(("rows", "inner", "outputs", "parts"), [*PARTS, *LARGE_PARTS])
def test_whatever_way_is_chosen_in_parts(rows: int, inner: int, outputs: int, parts: int) -> None:
    """Their sum is the matmul, with the bias in it once."""
    from quire.kernels.triton.matmul import linear_split_k

    x, weight, bias = make(rows, inner, outputs, HALF)
    weight = weight / inner**0.5
    # The interpreter takes seconds for a large one.
    for given in (bias, None) if outputs < 2000 else (bias if rows % 4 else None,):
        out = linear_split_k(x.to(DEVICE), weight.to(DEVICE), None if given is None else given.to(DEVICE))
        assert out.shape == (parts, rows, outputs)
        assert out.dtype == (HALF if parts == 1 else torch.float32)
        assert_close(sum_of(out, torch.float32), expect(x, weight, given), 2e-2 if parts == 1 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "inner"), WAYS)
def test_whatever_way_is_chosen_with_gates(rows: int, inner: int, dtype: torch.dtype) -> None:
    from quire.kernels.triton.matmul import gated_linear

    x, weight, bias = make(rows, inner, 140, dtype)
    weight = weight / inner**0.5
    out = gated_linear(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), "silu")
    assert out.dtype == dtype
    assert_close(out, ACTIVATIONS["silu"](expect(x, weight, bias)), 1e-3 if dtype == torch.float32 else 2e-2)
