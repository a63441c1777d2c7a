"""Activation ops. They use only exp, +, * and /: torch's own silu, gelu and tanh treat the last elements of a
buffer differently from the others on a CPU, so a row's result would depend on where in the batch it stands."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton
from quire.ops.fp8 import quantize_rows

Gated = Callable[[Tensor], Tensor]
GatedQuantized = Callable[[Tensor], tuple[Tensor, Tensor]]

_GELU_SCALE = -2.0 * math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702  # of gpt-oss
_ERF_SCALE = 0.3275911
_ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # of the highest power first
_STEP_OF_FP8 = 0.13  # two neighbours differ by an eighth at most


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [n, 2 * width] holds gate and then up; float32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    denominator = torch.neg(gate).exp_().add_(1.0)  # exp may reach inf: x / inf is the right limit
    return torch.div(gate, denominator, out=denominator).mul_(up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation: 0.5 x (1 + tanh u) is x / (1 + exp(-2u))."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = (gate * gate).mul_(_GELU_CUBIC).add_(1.0).mul_(gate).mul_(_GELU_SCALE)
    return torch.div(gate, inner.exp_().add_(1.0), out=inner).mul_(up).to(gate_up.dtype)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), where gate is at most 7 and up is within [-7, 7]; float32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    denominator = (gate * -_SWIGLU_ALPHA).exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up.add_(1.0)).to(gate_up.dtype)


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), where erf is within 1.5e-7 (Abramowitz and Stegun 7.1.26); float32 inside."""
    value = x.float()
    distance = value.abs().mul_(math.sqrt(0.5))
    t = distance.mul(_ERF_SCALE).add_(1.0).reciprocal_()
    tail = torch.full_like(t, _ERF_TERMS[0])
    for term in _ERF_TERMS[1:]:
        tail.mul_(t).add_(term)
    tail.mul_(t).mul_(distance.mul_(distance).neg_().exp_()).mul_(0.5)  # Phi of -|x|
    return torch.where(value < 0.0, tail, 1.0 - tail).mul_(value).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu(x) with the tanh approximation, as in `gelu_tanh_and_mul`; float32 inside."""
    value = x.float()
    inner = (value * value).mul_(_GELU_CUBIC).add_(1.0).mul_(value).mul_(_GELU_SCALE)
    return torch.div(value, inner.exp_().add_(1.0), out=inner).to(x.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by the exact Phi; gate_up [n, 2 * width] holds gate, then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate.contiguous()) * up


def tanh(x: Tensor) -> Tensor:
    """1 - 2 / (1 + exp(2x)); float32 inside."""
    return (1.0 - 2.0 / x.float().mul(2.0).exp_().add_(1.0)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); float32 inside."""
    return x.float().neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


def relu(x: Tensor) -> Tensor:
    return x.clamp_min(0.0)


def silu_and_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up quantized row by row: (values [n, width], scale [n])."""
    return quantize_rows(silu_and_mul(gate_up))


def gelu_tanh_and_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(gate) * up quantized row by row: (values [n, width], scale [n])."""
    return quantize_rows(gelu_tanh_and_mul(gate_up))


GELU: Op[Gated] = Op(gelu, 1e-5, triton("activation"), native())
GELU_TANH: Op[Gated] = Op(gelu_tanh, 1e-5, triton("activation"))
RELU: Op[Gated] = Op(relu, 1e-5, triton("activation"))
GELU_AND_MUL: Op[Gated] = Op(gelu_and_mul, 1e-5, triton("activation"), native())
SILU_AND_MUL: Op[Gated] = Op(silu_and_mul, 1e-5, triton("activation"), native())
GELU_TANH_AND_MUL: Op[Gated] = Op(gelu_tanh_and_mul, 1e-5, triton("activation"), native())
SILU_AND_MUL_FP8: Op[GatedQuantized] = Op(silu_and_mul_fp8, _STEP_OF_FP8, triton("activation"))
GELU_TANH_AND_MUL_FP8: Op[GatedQuantized] = Op(gelu_tanh_and_mul_fp8, _STEP_OF_FP8, triton("activation"))
