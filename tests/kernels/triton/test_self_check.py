"""Kernels that have to agree with simpler ones before they are used."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import needs_triton
from tests.kernels.triton.test_packed_matmul import make_packed

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.triton import self_check

    monkeypatch.setattr(self_check, "_agreed", {})


def test_a_kernel_is_compared_once() -> None:
    from quire.kernels.triton.self_check import agrees

    calls: list[str] = []

    def double(x: Tensor) -> Tensor:
        calls.append("")
        return 2 * x

    x = torch.ones(3, 4)
    assert all(agrees("double", x, double, lambda x: x + x) for _ in range(3))
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_wrong_kernel_is_refused_and_said(wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    from quire.kernels.triton.self_check import agrees

    with caplog.at_level(logging.WARNING, logger="quire"):
        assert not agrees("wrong", torch.ones(3, 4), lambda x: wrong * x, lambda x: x)
    assert "kernel wrong is not used" in caplog.text


def test_where_bits_are_promised_no_difference_is_too_small() -> None:
    from quire.kernels.triton.self_check import agrees

    x, nearly = torch.ones(3, 4), lambda x: x * (1 + 2**-22)
    assert agrees("close", x, nearly, lambda x: x)
    assert not agrees("close, not equal", x, nearly, lambda x: x, exactly=True)
    assert agrees("equal", x, torch.clone, lambda x: x, exactly=True)


def test_a_kernel_is_refused_that_differs_from_zeros() -> None:
    from quire.kernels.triton.self_check import agrees

    assert not agrees("noise", torch.ones(3, 4), lambda x: x, torch.zeros_like)
    assert agrees("zeros", torch.ones(3, 4), torch.zeros_like, torch.zeros_like)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_linear_layer_does_without_a_wrong_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.triton import packed_mlp

    def wrong(x: Tensor, weight: object, bias: object, activation: str) -> Tensor:
        return packed_mlp.packed_linear_fixed(x, weight, None, activation) * 1.1

    wrong.__name__ = "wrong"
    monkeypatch.setattr(packed_mlp, "_linear_of_one_row", wrong)
    monkeypatch.setattr(packed_mlp, "_wide_linear", wrong)
    monkeypatch.setattr(packed_mlp, "wide_fits", lambda *_: True)
    weight, _ = make_packed(1, 64, 128, 128, "zeros")
    x = torch.randn(rows, 128).to(HALF).to(DEVICE)
    assert torch.equal(
        packed_mlp.packed_linear(x, weight, None, ""), packed_mlp.packed_linear_fixed(x, weight, None, "")
    )
