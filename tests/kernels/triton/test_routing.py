"""Routing by a program for each token, against the stable sort of the op's reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("seed", range(24))
def test_routing(seed: int) -> None:
    from quire.kernels.triton.routing import route
    from quire.ops.routing import generate_inputs
    from quire.ops.routing import route as reference

    logits, bias, routing = generate_inputs(seed)
    logits = logits[:5]
    ids, weights = route(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), routing)
    expected_ids, expected = reference(logits, bias, routing)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6)
