"""Few rows of packed weights have the bits of many, by the tensor cores that both kernels use."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import needs_gpu
from tests.kernels.device import DEVICE
from tests.kernels.triton.test_packed_fragments import make

pytestmark = needs_gpu


@pytest.mark.parametrize(
    ("kind", "group", "n", "k", "splits", "columns"),
    [
        ("e2m1", 32, 5760, 2880, 1, 64),
        ("e2m1", 32, 2880, 2880, 2, 64),
        ("zeros", 128, 6144, 4096, 4, 128),
        ("implied", 64, 4096, 4096, 8, 128),
        ("zeros", 128, 1536, 2048, 1, 64),
        ("e4m3", 128, 5120, 2048, 4, 128),
        ("e4m3", 128, 1536, 2048, 1, 128),
        ("int8", 64, 2048, 4096, 8, 128),
    ],
)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_the_bits_are_those_of_many_rows(
    kind: str, group: int, n: int, k: int, splits: int, columns: int, activation: str
) -> None:
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_fragments import fragments_fit, packed_fragments
    from quire.kernels.triton.packed_matmul import packed_tiles
    from quire.kernels.triton.packed_wide import packed_wide, wide_fits

    torch.manual_seed(0)
    weight, _ = make(1, n, k, group, kind)
    x, bias = torch.randn(8, k).bfloat16().to(DEVICE), torch.randn(1, n).to(DEVICE)
    assert weight.has_bytes or wide_fits(x, weight)
    assert fragments_fit(x, weight)
    shape = GroupedShape(16, 64, columns, 4, 4)
    if weight.has_bytes:
        many = packed_tiles(x, None, weight, bias, 1, shape, activation, splits=splits)
    else:
        many = packed_wide(x, None, weight, bias, shape, activation, splits=splits)
    for rows in (1, 8):
        few = packed_fragments(x[:rows], None, weight, bias, activation, splits=splits, columns=columns)
        assert torch.equal(few, many[:rows])
