"""Sums over ranks in one kernel have the bits of a tree of additions."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton
from tests.parallel.test_shared_memory import tree

pytestmark = needs_triton


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("ranks", "shape"), [(1, (3, 5)), (2, (4, 65)), (3, (7, 600)), (4, (2, 1024)), (8, (3, 700)), (2, (0, 8))]
)
def test_the_sum_is_a_tree_over_the_ranks(ranks: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from quire.kernels.triton.rank_sum import rank_sum

    parts = torch.randn(ranks, *shape, generator=torch.Generator().manual_seed(ranks)).to(dtype)
    assert torch.equal(rank_sum(parts.to(DEVICE)).cpu(), tree(list(parts)))
