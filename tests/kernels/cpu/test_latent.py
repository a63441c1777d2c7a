"""The matrices of heads as codes with scales: their values on every instruction set, whatever the tokens are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import latent
from quire.ops.latent import GROUP, PER_HEAD, scaled, with_scales
from tests.kernels.cpu.isa import each_instruction_set, needs_library, using

pytestmark = needs_library


def make(heads: int, inner: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inner + outputs)
    codes = torch.randint(-128, 128, (heads, inner, outputs), dtype=torch.int8, generator=generator)
    return codes, torch.rand(heads, inner // GROUP, outputs, generator=generator).half()


def test_scales_behind_codes() -> None:
    codes, scales = make(3, 64, 24)
    weight = with_scales(codes, scales)
    assert weight.shape == (3, 68, 24)
    expected = codes.view(3, 2, GROUP, 24).float() * scales[:, :, None].float()
    assert torch.equal(scaled(weight, 64), expected.view(3, 64, 24))


@each_instruction_set
@pytest.mark.parametrize(("inner", "outputs"), [(64, 128), (128, 40), (32, 5)])
def test_codes_are_multiplied_as_their_values(inner: int, outputs: int, isa: str) -> None:
    weight = with_scales(*make(3, inner, outputs))
    x = torch.randn(17, 3, inner + 8, generator=torch.Generator().manual_seed(0))[..., :inner]
    with using(isa):
        found = latent.per_head(x, weight)
        alone = [latent.per_head(x[first : first + count], weight) for first, count in ((0, 1), (1, 2), (3, 14))]
    torch.testing.assert_close(found, PER_HEAD.reference(x, weight), atol=2e-2, rtol=1e-4)  # sums of up to 1e3
    assert torch.equal(torch.cat(alone), found)
