"""Inputs of the ops in quire/ops/grouped.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.gated_linear import ACTIVATIONS


def generate_gate_up_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, str]:
    n, k, experts, h, f = some_sizes(seed)
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, h, generator=generator),
        some_experts(n, k, experts, generator),
        torch.randn(experts, 2 * f, h, generator=generator) * h**-0.5,
        torch.randn(experts, 2 * f, generator=generator) if seed % 2 else None,
        sorted(ACTIVATIONS)[seed % len(ACTIVATIONS)],
    )


def generate_down_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    n, k, experts, h, f = some_sizes(seed)
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, k, f, generator=generator),
        some_experts(n, k, experts, generator),
        torch.rand(n, k, generator=generator),
        torch.randn(experts, h, f, generator=generator) * f**-0.5,
        torch.randn(experts, h, generator=generator) if seed % 2 else None,
    )


def generate_sparse_inputs(
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, str, bool]:
    x, expert_ids, gate_up, gate_up_bias, activation = generate_gate_up_inputs(seed)
    _, _, weights, down, down_bias = generate_down_inputs(seed)
    return x, expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, seed % 2 == 1


def generate_with_shared(seed: int) -> tuple[object, ...]:
    sparse = generate_sparse_inputs(seed)
    generator, h, width = torch.Generator().manual_seed(seed), sparse[0].shape[1], 24 * (1 + seed % 3)
    gate_up = torch.randn(2 * width, h, generator=generator) * h**-0.5
    shared = gate_up, torch.randn(h, width, generator=generator) * width**-0.5
    return *sparse, shared if seed % 3 and sparse[7] in ("silu", "gelu_tanh") else None


def generate_shared_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    n, _, _, h, _ = some_sizes(seed)
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(n, 1, generator=generator) if seed % 2 else None
    return torch.randn(n, h, generator=generator), torch.randn(n, h, generator=generator), gate


def some_sizes(seed: int) -> tuple[int, int, int, int, int]:
    """(tokens, experts of a token, experts, hidden size, width of an expert)."""
    return (
        (1, 3, 17, 70)[seed % 4],
        (2, 4, 1)[seed % 3],
        (4, 8, 16)[seed % 3],
        16 * (1 + seed % 9),
        8 * (1 + seed % 11),
    )


def some_experts(n: int, k: int, experts: int, generator: torch.Generator) -> Tensor:
    """No expert twice in a row, and one that nobody chose where there are few tokens."""
    return torch.rand(n, experts, generator=generator).argsort(-1)[:, :k].to(torch.int32)


INPUTS = {
    "grouped_gate_up": generate_gate_up_inputs,
    "grouped_down": generate_down_inputs,
    "sparse_mlp": generate_with_shared,
    "add_shared": generate_shared_inputs,
}
