"""The norm that adds up what ranks have, in the type of their results."""

from __future__ import annotations

import pytest
import torch

from quire.ops.split_k import add_rms_norm_split_k as reference
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_of_ranks_are_added_in_float32(ranks: int) -> None:
    from quire.kernels.triton.norm import add_rms_norm_split_k

    generator = torch.Generator().manual_seed(ranks)
    parts = torch.randn(ranks, 3, 65, generator=generator).to(HALF)
    residual, weight = torch.randn(3, 65, generator=generator).to(HALF), torch.randn(65, generator=generator).to(HALF)
    normed, total = add_rms_norm_split_k(parts.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-6)
    expected, expected_total = reference(parts, residual, weight, 1e-6)
    assert torch.equal(total.cpu(), expected_total)
    torch.testing.assert_close(normed.cpu(), expected, atol=2e-2, rtol=1e-2)
