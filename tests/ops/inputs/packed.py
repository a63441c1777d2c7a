"""Inputs of the ops in quire/ops/grouped.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.packed import E4M3, PackedWeight, pack_codes
from quire.ops.gated_linear import ACTIVATIONS
from tests.ops.inputs.grouped import generate_sparse_inputs


def generate_linear_inputs(seed: int) -> tuple[Tensor, PackedWeight, Tensor | None, str]:
    generator = torch.Generator().manual_seed(seed)
    rows, n, k = (1, 17, 300, 70)[seed % 4], 2 * (3 + seed % 40), 64 * (1 + seed % 3)
    bias = torch.randn(n, generator=generator) if seed % 2 else None
    activation = ("", *sorted(ACTIVATIONS))[seed % (1 + len(ACTIVATIONS))]
    return torch.randn(rows, k, generator=generator), _generate_weight(1, n, k, seed), bias, activation


def generate_packed_sparse_inputs(
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, PackedWeight, Tensor | None, PackedWeight, Tensor | None, str, bool]:
    x, expert_ids, weights, gate_up, _, _, _, activation, in_parts = generate_sparse_inputs(seed)
    experts, h, f = gate_up.shape[0], 64, 64 * (1 + seed % 2)
    generator = torch.Generator().manual_seed(seed)
    biases = [torch.randn(experts, width, generator=generator) if seed % 2 else None for width in (2 * f, h)]
    return (
        torch.randn(x.shape[0], h, generator=generator),
        expert_ids,
        weights,
        _generate_weight(experts, 2 * f, h, seed),
        biases[0],
        _generate_weight(experts, h, f, seed + 1),
        biases[1],
        activation,
        in_parts,
    )


def _generate_weight(experts: int, n: int, k: int, seed: int) -> PackedWeight:
    """Codes of every kind, with values of about K ** -0.5."""
    generator = torch.Generator().manual_seed(seed)
    group = (32, 64, k, 16, 32, 16, 64, 16)[seed % 8]
    shape = (experts, n, k // group)
    scales = (torch.rand(shape, generator=generator) + 0.5) * 0.2 * k**-0.5
    minima = torch.randn(shape, generator=generator) * k**-0.5 if seed % 8 in (4, 5, 7) else None
    if seed % 8 > 4:
        codes = torch.randint(-14, 15, (experts, n, k), generator=generator)
        return PackedWeight((codes / 8).to(E4M3) if seed % 8 == 6 else codes.to(torch.int8), scales, minima=minima)
    packed = pack_codes(torch.randint(0, 16, (experts, n, k), generator=generator))
    if seed % 8 == 0:
        exponents = torch.randint(121, 124, shape, generator=generator).to(torch.uint8)
        return PackedWeight(packed, exponents, None, is_float=True)
    if seed % 8 == 3:
        line_scale = torch.rand(experts, n, generator=generator) * k**-0.5
        return PackedWeight(packed, (scales * k**0.5).to(E4M3), None, is_float=True, line_scale=line_scale)
    zeros = torch.randint(0, 17, shape, generator=generator).to(torch.uint8) if seed % 8 == 2 else None
    return PackedWeight(packed, scales, zeros, minima=minima)


INPUTS = {"packed_linear": generate_linear_inputs, "packed_sparse_mlp": generate_packed_sparse_inputs}
