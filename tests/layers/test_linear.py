from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from quire.layers.quant.plain import TRANSPOSE_ROWS, PlainLinear
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 12, generator=GENERATOR)
F32 = Target(dtype=torch.float32)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_weight_is_stored_transposed_and_contiguous_in_the_dtype_asked_for() -> None:
    layer, weight = (
        ColumnParallelLinear(12, 8, bias=True, target=Target(dtype=torch.bfloat16), group=ParallelGroup()).allocate(),
        random(8, 12),
    )
    layer.load("weight", None, weight)
    assert isinstance(layer.method, PlainLinear)
    assert layer.method.weight.shape == (12, 8)
    assert layer.method.weight.is_contiguous()
    assert torch.equal(layer.method.weight, weight.bfloat16().t())
    assert layer.method.bias is not None
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("outputs", [TRANSPOSE_ROWS - 1, TRANSPOSE_ROWS, 2 * TRANSPOSE_ROWS + 3])
def test_blocks_of_a_transposed_load_cover_every_row(outputs: int) -> None:
    layer = ColumnParallelLinear(
        12, outputs, bias=False, target=Target("elsewhere"), group=ParallelGroup()
    ).allocate()
    weight = random(outputs, 12)
    layer.load("weight", None, weight)
    assert isinstance(layer.method, PlainLinear)
    assert torch.equal(layer.method.weight, weight.t())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_slices_concatenate(size: int) -> None:
    weight, bias = random(8, 12), random(8)
    parts = []
    for rank in range(size):
        layer = ColumnParallelLinear(12, 8, bias=True, target=F32, group=ParallelGroup(rank, size)).allocate()
        layer.load("weight", None, weight)
        layer.load("bias", None, bias)
        layer.finish()
        parts.append(layer(X))
    close(torch.cat(parts, dim=-1), X @ weight.t() + bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_slices_sum_with_the_bias_once(size: int) -> None:
    weight, bias, total = random(8, 12), random(8), torch.zeros(5, 8)
    for rank in range(size):
        layer = RowParallelLinear(12, 8, bias=True, target=F32, group=ParallelGroup(rank, size)).allocate()
        layer.load("weight", None, weight)
        layer.load("bias", None, bias)
        layer.finish()
        share = 12 // size
        total += layer(X[:, rank * share : (rank + 1) * share])
    close(total, X @ weight.t() + bias)


@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "merged-checkpoint"])
@pytest.mark.parametrize("size", [1, 2])
def test_merged_pieces_stay_apart_on_each_rank(size: int, whole: bool) -> None:
    gate, up = random(6, 12), random(6, 12)
    results: list[Tensor] = []
    for rank in range(size):
        layer = MergedColumnParallelLinear(
            12, {"gate": 6, "up": 6}, bias=False, target=F32, group=ParallelGroup(rank, size)
        ).allocate()
        load(layer, whole, {"gate": gate, "up": up})
        results.append(layer(X).unflatten(-1, (2, -1)))
    joined = torch.cat(results, dim=-1)
    close(joined[:, 0], X @ gate.t())
    close(joined[:, 1], X @ up.t())


@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "merged-checkpoint"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_qkv_is_split_by_heads_and_kv_heads_are_shared_by_more_ranks(size: int, whole: bool) -> None:
    heads, kv_heads, dim = 4, 2, 3
    q, k, v = random(heads * dim, 12), random(kv_heads * dim, 12), random(kv_heads * dim, 12)
    for rank in range(size):
        layer = QKVParallelLinear(
            12, heads, kv_heads, dim, bias=False, target=F32, group=ParallelGroup(rank, size)
        ).allocate()
        load(layer, whole, {"q_proj": q, "k_proj": k, "v_proj": v})
        local, local_kv = heads // size, max(1, kv_heads // size)
        first_kv = rank * kv_heads // size
        expected = [
            (X @ q.t()).unflatten(-1, (heads, dim))[:, rank * local : (rank + 1) * local],
            *((X @ w.t()).unflatten(-1, (kv_heads, dim))[:, first_kv : first_kv + local_kv] for w in (k, v)),
        ]
        close(layer(X), torch.cat(expected, dim=1).flatten(1))
        assert (layer.num_heads, layer.num_kv_heads) == (local, local_kv)


def load(layer: Linear, whole: bool, pieces: dict[str, Tensor]) -> None:
    if whole:
        layer.load("weight", None, torch.cat(list(pieces.values())))
    else:
        for name, tensor in reversed(pieces.items()):
            layer.load("weight", name, tensor)
    layer.finish()


def test_pieces_announce_checkpoint_shapes_whatever_the_rank_holds() -> None:
    layer = QKVParallelLinear(12, 4, 2, 3, bias=True, target=F32, group=ParallelGroup(1, 2)).allocate()
    assert layer.pieces("weight") == {"q_proj": (12, 12), "k_proj": (6, 12), "v_proj": (6, 12)}
    assert layer.pieces("bias") == {"q_proj": (12,), "k_proj": (6,), "v_proj": (6,)}
    row = RowParallelLinear(12, 8, bias=False, target=F32, group=ParallelGroup(1, 2)).allocate()
    assert row.pieces("weight") == {None: (8, 12)}


def test_kv_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 KV heads cannot be shared evenly by 3 ranks"):
        QKVParallelLinear(12, 6, 2, 3, bias=False, target=F32, group=ParallelGroup(0, 3)).allocate()
