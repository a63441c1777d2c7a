"""Soft-capping: tanh in shape, exact about its bounds, and the same for an element wherever it stands."""

from __future__ import annotations

import pytest
import torch

from quire.ops.scale import soft_cap


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_cap_times_tanh(cap: float, dtype: torch.dtype) -> None:
    x = torch.linspace(-4 * cap, 4 * cap, 1001).to(dtype)
    found = soft_cap(x, cap)
    expected = cap * torch.tanh(x.double() / cap)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=cap * max(1e-6, torch.finfo(dtype).eps))


def test_extremes_are_the_cap_itself() -> None:
    x = torch.tensor([-torch.inf, -1e30, 0.0, 1e30, torch.inf, torch.nan])
    found = soft_cap(x, 30.0)
    assert found[:5].tolist() == [-30.0, -30.0, 0.0, 30.0, 30.0]
    assert found[5].isnan()


def test_an_element_does_not_depend_on_its_place() -> None:
    x = torch.randn(1, 67, generator=torch.Generator().manual_seed(0)) * 40
    whole = soft_cap(x.expand(33, -1).contiguous(), 50.0)
    for width in (1, 3, 16, 31):
        assert torch.equal(soft_cap(x[:, :width].contiguous(), 50.0)[0], whole[-1, :width])


def test_the_input_is_left_alone() -> None:
    x = torch.ones(4)
    soft_cap(x, 2.0)
    assert torch.equal(x, torch.ones(4))
