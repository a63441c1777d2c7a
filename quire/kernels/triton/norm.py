"""RMS normalization, with the residual addition before it in the same pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    width,
    x_stride,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(sum_ptr.dtype.element_ty)  # what the next layer adds to is what is normalized here
        tl.store(sum_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
    tl.store(out_ptr + row * width + columns, (value * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., width], the last dimension contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    _launch(flat, flat, weight, out, out, eps, weight_offset, has_residual=False)
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual); both [n, width]."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, weight_offset, has_residual=True)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    weight_offset: float,
    *,
    has_residual: bool,
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        width,
        x.stride(0),
        eps,
        weight_offset,
        HAS_RESIDUAL=has_residual,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(),
    )
