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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [3, 64, 199, 4096])
def test_cancelling_activations_leave_nothing_but_rounding(k: int, dtype: torch.dtype) -> None:
    from quire.kernels.triton.self_check import cancelling

    lines = torch.randn(40, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = cancelling(lines)
    assert x.dtype == dtype
    terms = x.double() * lines.double()
    assert bool((terms.sum(1).abs() <= 2**-25 * terms.abs().sum(1)).all())
    assert k == 3 or bool((terms.abs().sum(1) > 1).all())
    assert bool((cancelling(torch.zeros(2, k)) * 0 == 0).all())


def test_a_library_that_adds_in_another_order_is_found_out_by_one_row_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results differ in the last bits of float32 alone, of which rounding hides nearly all."""
    from quire.kernels.triton import fixed_matmul

    def even_columns_first(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        even, odd = (x[:, start::2].float() @ weight[:, start::2].float().T for start in (0, 1))
        return (even + odd).to(x.dtype)

    def in_one(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: object) -> Tensor:
        return (x.float() @ weight.float().T).to(x.dtype)

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator).bfloat16()
    monkeypatch.setattr(fixed_matmul, "matmul_tiles", in_one)
    monkeypatch.setattr(fixed_matmul, "_AGREES", {})
    monkeypatch.setattr(torch.nn.functional, "linear", in_one)
    assert fixed_matmul._library_agrees(65, weight, None)
    monkeypatch.setattr(fixed_matmul, "_AGREES", {})
    monkeypatch.setattr(torch.nn.functional, "linear", even_columns_first)
    assert not fixed_matmul._library_agrees(65, weight, None)
    x = torch.randn(65, 256, generator=generator).bfloat16()
    assert torch.equal(in_one(x, weight), even_columns_first(x, weight))  # which random activations would not tell
