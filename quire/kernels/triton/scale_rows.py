"""Rows, or the first part of each, times a number of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options


@triton.jit
def _scale_rows_kernel(
    x_ptr, factors_ptr, out_ptr, width, stride, count, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factors_ptr + row * stride).to(tl.float32)
    out = tl.where(columns < count, x * factor, x)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, factors: Tensor, count: int) -> Tensor:
    """x [n, width] with the first `count` of row i times the first of factors[i]."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        block = min(1024, int(triton.next_power_of_2(width)))
        grid = (rows, triton.cdiv(width, block))
        _scale_rows_kernel[grid](
            x, factors, out, width, factors.stride(0), count, BLOCK=block, num_warps=4, **launch_options()
        )
    return out
