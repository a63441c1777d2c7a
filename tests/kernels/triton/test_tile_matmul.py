"""Matmuls as tiles of outputs x tokens, against plain torch in float64, and by bits where no split is made."""

from __future__ import annotations

import pytest
import torch

from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.split_k import sum_of
from tests.kernels.device import DEVICE, HALF, NATIVE
from tests.kernels.triton.paged import assert_close, needs_triton
from tests.kernels.triton.test_matmul import expect, make

pytestmark = needs_triton


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "inner", "outputs"), [(3, 150, 77), (16, 64, 16), (40, 33, 5), (2, 257, 33)])
def test_odd_sizes(rows: int, inner: int, outputs: int, splits: int) -> None:
    """More splits than pieces of the inner dimension leave some programs without work; the sum is whole anyway."""
    from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

    x, weight, bias = make(rows, inner, outputs)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for given in (None, bias):
        placed = None if given is None else given.to(DEVICE)
        shape = TileShape(splits=splits, bt=32, bn=64, bk=32, group=2)
        out = matmul_tiles(x.to(DEVICE), weight.to(DEVICE), placed, shape=shape, counters=counters)
        assert_close(out, expect(x, weight, given), 1e-4)
        assert not bool(counters.any()), "the next launch counts from zero"


@pytest.mark.parametrize(("rows", "inner", "outputs"), [(3, 150, 77), (40, 33, 5)])
def test_parts_are_what_would_be_added_up(rows: int, inner: int, outputs: int) -> None:
    """One after the other, to the bit, so that leaving them to the next kernel changes nothing."""
    from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

    x, weight, bias = (tensor.to(DEVICE) for tensor in make(rows, inner, outputs))
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    shape = TileShape(splits=3, bt=32, bn=64, bk=32)
    parts = matmul_tiles(x, weight, shape=shape, in_parts=True)
    assert parts.shape == (3, rows, outputs)
    assert torch.equal(sum_of(parts, x.dtype), matmul_tiles(x, weight, shape=shape, counters=counters))
    assert_close(
        matmul_tiles(x, weight, bias, shape=shape, in_parts=True).sum(0),
        expect(x.cpu(), weight.cpu(), bias.cpu()),
        1e-4,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "inner", "outputs", "splits"), [(3, 150, 37, 1), (40, 64, 32, 3), (2, 257, 70, 2)])
def test_gates_in_the_same_kernel(rows: int, inner: int, outputs: int, splits: int, activation: str) -> None:
    """Tiles that are not full, and halves of the weight that begin within one."""
    from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

    x, weight, bias = make(rows, inner, 2 * outputs)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    shape = TileShape(splits=splits, bt=32, bn=64, bk=32, group=2)
    placed = [tensor.to(DEVICE) for tensor in (x, weight, bias)]
    out = matmul_tiles(*placed, shape=shape, counters=counters, activation=activation)
    assert_close(out, ACTIVATIONS[activation](expect(x, weight, bias)), 1e-3)
    assert not bool(counters.any())


def test_scales_of_tokens_and_outputs() -> None:
    from quire.kernels.triton.quantize import FP8
    from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

    x, weight, _ = make(5, 64, 40)
    x, weight = x.to(FP8), weight.to(FP8)
    scales = torch.rand(5), torch.rand(40)
    out = matmul_tiles(
        x.to(DEVICE),
        weight.to(DEVICE),
        scales=(scales[0].to(DEVICE), scales[1].to(DEVICE)),
        out_dtype=torch.float32,
        shape=TileShape(bk=32),
    )
    expected = expect(x.float() * scales[0][:, None], weight.float() * scales[1][:, None], None)
    assert_close(out, expected, 1e-2)


@pytest.mark.skipif(not NATIVE, reason="numpy's order of sums, which the interpreter takes, varies")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    from quire.kernels.triton.fixed_matmul import linear_transposed

    x, weight, bias = make(130, 256, 70, dtype)
    placed = [tensor.to(DEVICE) for tensor in (x, weight, bias)]
    whole = linear_transposed(*placed)
    assert_close(whole / 16, expect(x, weight, bias) / 16, 1e-4 if dtype == torch.float32 else 1e-2)
    for count in (1, 16, 17, 65):
        assert torch.equal(linear_transposed(placed[0][-count:].contiguous(), *placed[1:]), whole[-count:])


@pytest.mark.skipif(not NATIVE, reason="numpy's order of sums, which the interpreter takes, varies")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gates_have_the_same_bits_in_any_company(dtype: torch.dtype, activation: str) -> None:
    """Whether they are part of the matmul's kernel, or come after it."""
    from quire.kernels.triton.activation import GATED
    from quire.kernels.triton.fixed_matmul import gated_linear, linear_transposed

    x, weight, bias = (tensor.to(DEVICE) for tensor in make(130, 256, 140, dtype))
    whole = GATED[activation](linear_transposed(x, weight, bias))
    for count in (1, 16, 17, 64, 65, 130):
        assert torch.equal(gated_linear(x[-count:].contiguous(), weight, bias, activation), whole[-count:])
