"""Gated activations: act(gate) * up from one [n, 2 * width] buffer, quantized in the same pass if wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.kernels.triton.quantize import empty_lines, quantize_line, quantize_rows

_BLOCK = 1024
# With fewer, lines in pieces and a second pass are faster than one program for each: measured on an H200.
_MIN_LINES = 64


@triton.jit
def gate_times_up(gate, up, GELU: tl.constexpr):
    """act(gate) * up, all float32."""
    inner = -gate
    if GELU:
        inner = -1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)  # -2 * sqrt(2 / pi) * ...
    return gate / (1.0 + tl.exp(inner)) * up


@triton.jit
def _activate(x_ptr, row, columns, width, x_stride, GELU: tl.constexpr):
    """A piece of a line, rounded to the type of x."""
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    return gate_times_up(gate, up, GELU).to(x_ptr.dtype.element_ty)


@triton.jit
def _gated_kernel(x_ptr, out_ptr, width, x_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = _activate(x_ptr, row, columns, width, x_stride, GELU)
    tl.store(out_ptr + row * width + columns, out, mask=columns < width)


@triton.jit
def _gated_line_kernel(
    x_ptr, out_ptr, scale_ptr, width, x_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    out, scale = quantize_line(_activate(x_ptr, row, columns, width, x_stride, GELU).to(tl.float32))
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=columns < width)
    tl.store(scale_ptr + row, scale)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, gelu=True)


def silu_and_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_rows` makes of `silu_and_mul`."""
    return _gated_lines(gate_up, gelu=False)


def gelu_tanh_and_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_rows` makes of `gelu_tanh_and_mul`."""
    return _gated_lines(gate_up, gelu=True)


GATED = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, width, gate_up.stride(0), GELU=gelu, BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return out


def _gated_lines(gate_up: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if rows < _MIN_LINES:
        return quantize_rows(_gated(gate_up, gelu=gelu))
    out, scale = empty_lines(gate_up, width)
    block = triton.next_power_of_2(width)
    _gated_line_kernel[(rows,)](
        gate_up,
        out,
        scale,
        width,
        gate_up.stride(0),
        GELU=gelu,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(),
    )
    return out, scale
