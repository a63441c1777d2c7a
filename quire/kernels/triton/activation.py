"""Activations, and act(gate) * up from one [n, 2 * width] buffer, quantized in the same pass if wanted."""

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
def _plain_kernel(
    x_ptr, out_ptr, width, x_stride, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """ACT is "relu", "gelu_tanh" or "gelu", by the error function; GATED: times what stands `width` columns on."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = x_ptr + row * x_stride + columns
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ACT == "relu":
        out = tl.where(x < 0.0, 0.0, x)  # what is not a number stays one
    elif ACT == "gelu_tanh":
        out = gate_times_up(x, 1.0, True)
    else:
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if GATED:  # the activation is rounded before, as two ops would do it
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32) * tl.load(at + width, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


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


def gelu(x: Tensor) -> Tensor:
    return _plain(x, "gelu")


def gelu_tanh(x: Tensor) -> Tensor:
    return _plain(x, "gelu_tanh")


def relu(x: Tensor) -> Tensor:
    return _plain(x, "relu")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _plain(gate_up, "gelu", gated=True)


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


def _plain(x: Tensor, act: str, *, gated: bool = False) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _plain_kernel[(rows, triton.cdiv(width, _BLOCK))](
            x, out, width, x.stride(0), ACT=act, GATED=gated, BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return out


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
