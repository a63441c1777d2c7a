"""Products that stay in parts until a norm merges them into the residual stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.layers.linear import RowParallelLinear
from quire.layers.norm import Fp8RMSNorm, RMSNorm
from quire.models.blocks import merge_residual
from quire.models.config import read_config
from quire.ops.base import Target
from quire.ops.parts import Parts, sum_of
from quire.parallel.groups import ParallelGroup
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton
from tests.models.zoo import SIZES

INNER, WIDTH = 1152, 80
TARGET = Target("cuda", HALF)


def layer(target: Target = TARGET, group: ParallelGroup | None = None) -> RowParallelLinear:
    with torch.device(DEVICE):
        linear = RowParallelLinear(INNER, WIDTH, bias=True, target=target, group=group or ParallelGroup())
    for seed, parameter in enumerate(linear.parameters()):
        parameter.data.copy_(numbers(seed, *parameter.shape) / INNER**0.5)
    return linear


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


@needs_triton
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_a_norm_adds_them_up(rows: int) -> None:
    linear, x, residual = layer(), numbers(3, rows, INNER), numbers(4, rows, WIDTH)
    with torch.device(DEVICE):
        norm = RMSNorm(WIDTH, eps=1e-6, target=TARGET)
    norm.weight.data.copy_(numbers(5, WIDTH))
    product = linear.product(in_parts=True)(x)
    assert isinstance(product, Parts) == (rows > 1)
    for mine, theirs in zip(norm.merge(product, residual), norm.merge(linear(x), residual), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


@needs_triton
def test_who_reads_them_otherwise_gets_their_sum() -> None:
    values, residual = torch.stack([numbers(seed, 4, WIDTH).float() for seed in range(3)]), numbers(4, 4, WIDTH)
    parts = Parts(values, HALF)
    assert torch.equal(parts.summed(), ((values[0] + values[1]) + values[2]).to(HALF))
    assert torch.equal(merge_residual(parts, residual), residual + parts.summed())
    with torch.device(DEVICE):
        norm = Fp8RMSNorm(WIDTH, eps=1e-6, target=TARGET)
    norm.weight.data.copy_(numbers(5, WIDTH))
    (lines, total), (same, stream) = norm.merge(parts, residual), norm.merge(parts.summed(), residual)
    assert torch.equal(total, stream)
    assert torch.equal(lines.unpacked(), same.unpacked())


@needs_triton
def test_products_stay_whole_where_something_comes_between() -> None:
    """Ranks have to be added up first; deterministic mode never splits; a scale is not a norm."""
    x = numbers(3, 5, INNER)
    assert isinstance(layer().product(in_parts=False)(x), Tensor)
    whole = layer(Target("cuda", HALF, deterministic=True))
    assert whole.product(in_parts=True) == whole.forward
    shared = layer(group=ParallelGroup(0, 2))
    assert shared.product(in_parts=True) == shared.forward
    assert layer(Target(dtype=HALF)).method.in_parts() is None
    llama = read_config({**SIZES, "hidden_act": "silu", "rms_norm_eps": 1e-6})
    assert llama.merges_products
    assert not replace(llama, norms="pre_post").merges_products
    assert not replace(llama, residual_multiplier=0.5).merges_products


def test_one_part_is_its_own_sum() -> None:
    values = torch.randn(1, 3, 4)
    assert torch.equal(sum_of(values, torch.float32), values[0])
