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
    from quire.ops.routing import route as reference
    from tests.ops.inputs.routing import generate_inputs

    logits, bias, routing = generate_inputs(seed)
    logits = logits[:5]
    ids, weights = route(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), routing)
    expected_ids, expected = reference(logits, bias, routing)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_logits_of_half_precision_are_those_of_float32_whatever_the_number_of_tokens() -> None:
    from quire.kernels.triton.routing import router_logits, router_logits_fast
    from tests.kernels.device import HALF

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1030, 192, generator=generator).to(HALF)
    weight = torch.randn(40, 192, generator=generator) * 0.1
    found = router_logits(x.to(DEVICE), weight.to(DEVICE), None).cpu()
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=2e-5, rtol=2e-5)
    few = router_logits(x[:3].to(DEVICE), weight.to(DEVICE), None).cpu()
    assert torch.equal(few, found[:3]), "splits of one program are added up as those of several"
    alone = router_logits_fast(x[:1].to(DEVICE), weight.to(DEVICE), None).cpu()
    torch.testing.assert_close(alone, found[:1], atol=2e-5, rtol=2e-5)
