"""Inputs of the ops in quire/ops/fp8.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.fp8 import quantize_rows


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, inner, outputs = (1, 2, 16, 17, 40, 70)[seed % 6], 64 * (1 + seed % 5), 16 * (1 + seed % 7)
    # Multiples of 1/8 up to 7/4, which every row holds: exact as fp8, so that nothing is rounded.
    x, weight = (torch.randint(-14, 15, (n, inner), generator=generator) / 8 for n in (rows, outputs))
    x[:, 0] = weight[:, 0] = 1.75
    quantized, scale = quantize_rows(weight)
    return x, quantized, scale, torch.randn(outputs, generator=generator)


def generate_prequantized(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    x, weight, scale, bias = generate_inputs(seed)
    return *quantize_rows(x), weight, scale, bias, x.dtype


INPUTS = {"linear_fp8": generate_inputs, "prequantized_linear_fp8": generate_prequantized}
