"""The plain method: values in the model's dtype, block formats decoded, and the bytes that were planned."""

from __future__ import annotations

import gguf
import pytest
import torch

from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from quire.layers.quant.plain import PlainLinear, PlainTable
from quire.layers.scheme import F32, StoredMatrix
from quire.loader.gguf_quants import SCHEMES
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup

NONE = Target(quantization="none")
VALUES = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
Q8_0 = SCHEMES["Q8_0"]
DATA = gguf.quants.quantize(VALUES.numpy(), gguf.GGMLQuantizationType.Q8_0)
BLOCKS = StoredMatrix(Q8_0, (24, 64), {"weight": torch.from_numpy(DATA)})
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_decoded_into_the_dtype(dtype: torch.dtype) -> None:
    target = Target("elsewhere", dtype, "none")
    layer = MergedColumnParallelLinear(
        64, {"a": 8, "b": 16}, bias=False, target=target, group=ParallelGroup()
    ).allocate()
    layer.load("weight", "b", BLOCKS.part(0, 8, 16))
    layer.load("weight", "a", BLOCKS.part(0, 0, 8))
    layer.finish()
    assert isinstance(layer.method, PlainLinear)
    assert torch.equal(layer.method.weight, BLOCKS.tensor().to(dtype).t())
    planned = layer.planned_bytes({("weight", "a"): Q8_0, ("weight", "b"): Q8_0})
    assert layer.method.num_bytes == planned == VALUES.numel() * dtype.itemsize


@pytest.mark.parametrize("size", [2, 4])
def test_input_slices_of_blocks(size: int) -> None:
    total = torch.zeros(3, 24)
    for rank in range(size):
        layer = RowParallelLinear(64, 24, bias=False, target=NONE, group=ParallelGroup(rank, size)).allocate()
        layer.load("weight", None, BLOCKS)
        layer.finish()
        total += layer(X[:, rank * 64 // size : (rank + 1) * 64 // size])
    torch.testing.assert_close(total, X @ BLOCKS.tensor().t(), atol=1e-4, rtol=1e-4)


def test_a_table_looks_up_and_multiplies() -> None:
    embedding = VocabParallelEmbedding(24, 64, target=NONE, group=ParallelGroup()).allocate()
    embedding.load("weight", None, VALUES)
    embedding.finish()
    assert isinstance(embedding.method, PlainTable)
    assert torch.equal(embedding(torch.tensor([23, 0, 7])), VALUES[[23, 0, 7]])
    torch.testing.assert_close(embedding.method.multiply(X), X @ VALUES.t(), atol=1e-4, rtol=1e-4)
    assert embedding.planned_bytes({("weight", None): F32}) == embedding.method.num_bytes


@pytest.mark.usefixtures("torch_kernels")
def test_torchs_own_matmuls_need_a_recipe() -> None:
    layer = RowParallelLinear(64, 24, bias=False, target=NONE, group=ParallelGroup()).allocate()
    table = VocabParallelEmbedding(24, 64, target=NONE, group=ParallelGroup()).allocate()
    for method in (layer.method, table.method):
        assert isinstance(method, PlainLinear)
        assert not method.is_invariant
