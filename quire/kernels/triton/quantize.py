"""Activations as fp8: each line with its own scale, taken from its largest value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Of a line of zeros; a smaller scale would not be a normal number.
MIN_SCALE = 1e-30


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, width, x_stride, TOP: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / TOP, LEAST)
    # The division may round up to just above the largest number there is.
    scaled = tl.minimum(tl.maximum(value / scale, -TOP), TOP)
    # A value that is not a number must stay one, so that the request is found and fails.
    scaled = tl.where(value == value, scaled, value)
    tl.store(out_ptr + row * width + columns, scaled.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale as fp8 [n, width], scale [n] float32) of x [n, width], the last dimension contiguous."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=FP8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _quantize_kernel[(rows,)](
            x,
            out,
            scale,
            width,
            x.stride(0),
            TOP=FP8_MAX,
            LEAST=MIN_SCALE,
            BLOCK=block,
            num_warps=max(1, min(16, block // 1024)),
            **launch_options(),
        )
    return out, scale
