"""What passes between layers besides tensors: split-K partial sums and pre-quantized activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, make_batch
from quire.attention.registry import BACKENDS
from quire.cli.verify import _tensor_of
from quire.layers.attention import Attention, ForwardBatch, WantedTokens
from quire.layers.fusion import Form, RowShard, whole
from quire.layers.linear import RowParallelLinear
from quire.layers.norm import ResidualMerge, RMSNorm
from quire.ops.base import Target
from quire.ops.fp8 import QuantizedActivations
from quire.ops.split_k import PartialSums, sum_of
from quire.parallel.collectives import NullCollectives
from quire.parallel.groups import ParallelGroup
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton

INNER, WIDTH = 1152, 80
TARGET = Target("cuda", HALF)


def layer(target: Target = TARGET, group: ParallelGroup | None = None) -> RowParallelLinear:
    with torch.device(DEVICE):
        group = group or ParallelGroup()
        # Each rank has as much of the inner dimension, so that it could be in parts.
        linear = RowParallelLinear(INNER * group.size, WIDTH, bias=True, target=target, group=group).allocate()
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
    whole = linear(x)
    linear.feed(norm.accepts)
    matmul = linear(x)
    assert isinstance(matmul, PartialSums) == (rows > 1)
    for mine, theirs in zip(norm.merge(matmul, residual), norm.merge(whole, residual), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


@needs_triton
def test_who_reads_them_otherwise_gets_their_sum() -> None:
    values, residual = torch.stack([numbers(seed, 4, WIDTH).float() for seed in range(3)]), numbers(4, 4, WIDTH)
    parts = PartialSums(values, HALF)
    assert torch.equal(parts.summed(), ((values[0] + values[1]) + values[2]).to(HALF))
    assert torch.equal(whole(ResidualMerge().merge(parts, residual)[1]), residual + parts.summed())
    with torch.device(DEVICE):
        norm = RMSNorm(WIDTH, eps=1e-6, target=TARGET)
    norm.feed(frozenset({Form.E4M3_PER_TOKEN}))
    norm.weight.data.copy_(numbers(5, WIDTH))
    (lines, total), (same, stream) = norm.merge(parts, residual), norm.merge(parts.summed(), residual)
    assert torch.equal(total, stream)
    rows = RowShard(parts, 4, NullCollectives())
    gathered, held = norm.merge(rows, residual)  # what is quantized is gathered as it is
    assert isinstance(gathered, QuantizedActivations)
    assert isinstance(lines, QuantizedActivations)
    assert all(map(torch.equal, (gathered.values.float(), gathered.scale), (lines.values.float(), lines.scale)))
    assert torch.equal(whole(held), total)
    assert torch.equal(lines.unpacked(), same.unpacked())


@needs_triton
def test_matmuls_stay_whole_where_something_comes_between() -> None:
    """Ranks have to be added up first; deterministic mode never splits."""
    x = numbers(3, 5, INNER)
    assert isinstance(layer()(x), Tensor)
    deterministic, shared = layer(Target("cuda", HALF, deterministic=True)), layer(group=ParallelGroup(0, 2))
    for linear in (deterministic, shared):
        linear.feed(frozenset({Form.PARTIAL_SUMS}))
        assert isinstance(linear(x), Tensor)
    assert layer(Target(dtype=HALF)).method.split_k() is None


def test_one_part_is_its_own_sum() -> None:
    values = torch.randn(1, 3, 4)
    assert torch.equal(sum_of(values, torch.float32), values[0])


@needs_triton
@pytest.mark.parametrize("backend", ["torch_ref", "triton"])
@pytest.mark.parametrize("few", [False, True], ids=["all", "wanted"])
def test_attention_takes_queries_keys_and_values_in_parts(backend: str, few: bool) -> None:
    """The kernel that rotates adds them up; elsewhere, and where only some tokens go on, they are whole first."""
    chosen = BACKENDS.get(backend)()
    spec, target = AttentionSpec(4, 2, 16, 0.25), Target("cuda", HALF)
    layer = Attention(spec, 0, target)
    shape = chosen.cache_shape(4, 16, 2, 16)
    parts = PartialSums(torch.stack([numbers(seed, 5, 8 * 16).float() for seed in range(2)]), HALF)
    tokens = torch.tensor([1, 4], device=DEVICE)
    table = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    metadata = chosen.prepare_eager(make_batch([5], [5], table, torch.arange(16, 21, device=DEVICE), 16))
    alone = chosen.prepare_eager(make_batch([1, 1], [2, 5], table.expand(2, -1), tokens, 16))
    wanted = WantedTokens(tokens, [alone], torch.zeros(5, dtype=torch.bool, device=DEVICE)) if few else None
    results = []
    for qkv in (parts, parts.summed()):
        layer.bind(chosen, torch.zeros(shape, dtype=HALF, device=DEVICE), 0)
        results.append((layer(qkv, None, None, ForwardBatch([metadata], wanted)), layer.cache))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.count_nonzero()


def test_verify_compares_what_passes_between_modules() -> None:
    values = torch.arange(6.0).view(2, 1, 3)
    lines = QuantizedActivations(torch.ones(1, 3).to(torch.float8_e4m3fn), torch.tensor([2.0]), torch.float32)
    for passed, expected in (
        (PartialSums(values, torch.float32), [[3.0, 5.0, 7.0]]),
        (lines, [[2.0, 2.0, 2.0]]),
        ((PartialSums(values, torch.float32), "residual"), [[3.0, 5.0, 7.0]]),
        (values[0], [[0.0, 1.0, 2.0]]),
    ):
        assert _tensor_of(passed).tolist() == expected
