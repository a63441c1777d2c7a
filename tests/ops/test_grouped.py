"""Grouped matmuls against a plain loop over tokens and slots in float64; and rows by themselves, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.grouped import grouped_down, grouped_gate_up
from tests.ops.inputs.grouped import generate_down_inputs, generate_gate_up_inputs


def naive_gate_up(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    out = torch.empty(*ids.shape, weight.shape[1] // 2)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        expert = int(ids[token, slot])
        gate_up = weight[expert].double() @ x[token].double()
        if bias is not None:
            gate_up += bias[expert]
        out[token, slot] = ACTIVATIONS[activation](gate_up.float().unsqueeze(0))[0]
    return out


def naive_down(a: Tensor, ids: Tensor, weights: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.zeros(a.shape[0], weight.shape[1], dtype=torch.float64)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        expert = int(ids[token, slot])
        row = weight[expert].double() @ a[token, slot].double()
        if bias is not None:
            row += bias[expert]
        out[token] += row * weights[token, slot]
    return out.float()


@pytest.mark.parametrize("seed", range(12))
def test_are_a_loop_over_tokens_and_their_experts(seed: int) -> None:
    for run, naive, inputs in (
        (grouped_gate_up, naive_gate_up, generate_gate_up_inputs(seed)),
        (grouped_down, naive_down, generate_down_inputs(seed)),
    ):
        torch.testing.assert_close(run(*inputs), naive(*inputs), atol=1e-4, rtol=1e-4)  # type: ignore[operator]


def test_a_row_alone_is_that_row_among_64() -> None:
    torch.manual_seed(0)
    n, k, experts, h, f = 64, 4, 8, 96, 40
    x, a, weights = torch.randn(n, h), torch.randn(n, k, f), torch.rand(n, k)
    ids = torch.rand(n, experts).argsort(-1)[:, :k].to(torch.int32)
    up, down = torch.randn(experts, 2 * f, h), torch.randn(experts, h, f)
    gated, summed = grouped_gate_up(x, ids, up, None, "silu"), grouped_down(a, ids, weights, down, None)
    for row in (slice(0, 1), slice(31, 32), slice(63, 64), slice(10, 17)):
        assert torch.equal(grouped_gate_up(x[row], ids[row], up, None, "silu"), gated[row])
        assert torch.equal(grouped_down(a[row], ids[row], weights[row], down, None), summed[row])


def test_the_slots_of_a_token_are_added_in_order_in_float32() -> None:
    """In another order, or in the type of the activations, the small ones would be lost beside the large ones."""
    a = torch.tensor([[[1e4], [1.0], [-1e4]]], dtype=torch.bfloat16)
    ids, one = torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.bfloat16)
    out = grouped_down(a, ids, torch.tensor([[1.0, 1.0, 1.0]]), one, None)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[1.0]]


def test_the_clamped_activation_is_gpt_oss_own() -> None:
    gate_up = torch.tensor([[9.0, -2.0, 0.5, 8.0, -9.0, 0.25]])
    gate, up = gate_up[:, :3].clamp(max=7.0), gate_up[:, 3:].clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    torch.testing.assert_close(ACTIVATIONS["clamped_swiglu"](gate_up), expected)
