"""Products with a weight kept in eight-bit floats: each row of both sides has a scale of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Of a row of zeros.
MIN_SCALE = 1e-30

Fp8Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
PrequantizedMatmul = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


class QuantizedActivations(NamedTuple):
    """Activations quantized row by row where they were computed."""

    values: Tensor  # [n, width] fp8
    scale: Tensor  # [n] float32
    dtype: torch.dtype  # what they were before

    def unpacked(self) -> Tensor:
        return (self.values.float() * self.scale[:, None]).to(self.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale as fp8 [n, width], scale [n] float32): a row's largest value becomes the largest fp8 number."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / FP8_MAX).clamp_(min=MIN_SCALE)
    return (wide / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, K] @ (weight [N, K] * scale [N, 1]).T + bias, x being quantized row by row first. In x's type."""
    return prequantized_linear_fp8(*quantize_rows(x), weight, scale, bias, x.dtype)


def prequantized_linear_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x [n, K] * x_scale [n, 1]) @ (weight [N, K] * scale [N, 1]).T + bias, in `dtype`; both are fp8."""
    out = (x.float() @ weight.float().t()) * x_scale[:, None] * scale
    return (out if bias is None else out + bias.float()).to(dtype)


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


_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_UNAVAILABLE = "triton.quantize:unavailable"


def _products(function: str) -> tuple[Implementation, ...]:
    return (
        Implementation("triton", f"triton.fp8:{function}", ("cuda",), _TYPES, _UNAVAILABLE, varies=True),
        Implementation("triton_fixed", f"triton.fp8:{function}_fixed", ("cuda",), _TYPES, _UNAVAILABLE),
    )


LINEAR_FP8: Op[Fp8Product] = Op("linear_fp8", linear_fp8, generate_inputs, 2e-2, _products("linear_fp8"))
PREQUANTIZED_LINEAR_FP8: Op[PrequantizedMatmul] = Op(
    "prequantized_linear_fp8",
    prequantized_linear_fp8,
    generate_prequantized,
    2e-2,
    _products("prequantized_linear_fp8"),
)
