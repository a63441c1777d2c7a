"""Activations as fp8: each line with its own scale, taken from its largest value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

FP8 = torch.float8_e4m3fn
_FIRST_WITH_FP8 = (8, 9)


def unavailable() -> str | None:
    """Why this device has no eight-bit floats; None if it has."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _FIRST_WITH_FP8:
        return None
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"eight-bit floats need a GPU of compute capability 8.9 or newer, and {name} has {major}.{minor}"


@triton.jit
def quantize_line(value):
    """(value / scale, scale) of a line of float32, the first of them to be rounded to fp8, whose largest is 448."""
    # Of a line of zeros the scale is the least that is still a normal number after all products.
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / 448.0, 1e-30)
    # The division may round up to just above the largest number there is.
    scaled = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
    # A value that is not a number must stay one, so that the request is found and fails.
    return tl.where(value == value, scaled, value), scale


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, width, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scaled, scale = quantize_line(value)
    tl.store(out_ptr + row * width + columns, scaled.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def empty_lines(x: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Unfilled fp8 values [n, width] and scales [n] for x [n, ...], as wide as x unless a width is given."""
    values = torch.empty(x.shape[0], width or x.shape[1], dtype=FP8, device=x.device)
    return values, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale as fp8 [n, width], scale [n] float32) of x [n, width], the last dimension contiguous."""
    rows, width = x.shape
    out, scale = empty_lines(x)
    if rows:
        block = triton.next_power_of_2(width)
        _quantize_kernel[(rows,)](
            x,
            out,
            scale,
            width,
            x.stride(0),
            BLOCK=block,
            num_warps=max(1, min(16, block // 1024)),
            **launch_options(),
        )
    return out, scale
