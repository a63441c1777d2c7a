"""RMS normalization; in the same pass the sum of a matmul in parts and of a residual before, quantization after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import allow_dependents, launch_options, wait_for_predecessor
from quire.kernels.triton.quantize import empty_lines, quantize_line


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    scale_ptr,  # [rows] float32, of quantized lines
    width,
    x_stride,
    part_stride,
    eps,
    weight_offset,
    PARTS: tl.constexpr,  # of x, to be added up
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
    wait_for_predecessor(PDL)
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:  # their sum is rounded as if the matmul had been whole
        for part in tl.static_range(1, PARTS):
            value += tl.load(x_ptr + part * part_stride + row * x_stride + columns, mask=inside, other=0.0)
        value = value.to(sum_ptr.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(sum_ptr.dtype.element_ty)  # what the next layer adds to is what is normalized here
        tl.store(sum_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    out = value * scale * weight
    if QUANTIZED:
        out, line_scale = quantize_line(out.to(x_ptr.dtype.element_ty).to(tl.float32))
        tl.store(scale_ptr + row, line_scale)
        # No more at a time than without quantization: a thread's share of the line decides the order of the sum.
        columns = tl.max_contiguous(tl.arange(0, BLOCK), 128 // x_ptr.dtype.element_ty.primitive_bitwidth)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=columns < width)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., width], the last dimension contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    _launch(flat, None, weight, out, out, None, eps, weight_offset)
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual); both [n, width]."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, None, eps, weight_offset)
    return out, total


def add_rms_norm_split_k(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same of the sum of parts [parts, n, width]."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(parts, residual, weight, out, total, None, eps, weight_offset)
    return out, total


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """What `quantize_rows` makes of the norm of x [n, width]."""
    values, scale = empty_lines(x)
    _launch(x, None, weight, values, values, scale, eps, weight_offset)
    return values, scale


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """What `quantize_rows` makes of the norm of x + residual, and x + residual."""
    total = torch.empty_like(x)
    values, scale = empty_lines(x)
    _launch(x, residual, weight, values, total, scale, eps, weight_offset)
    return values, scale, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    scale: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    rows, width = out.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    # Parts are read by more threads: there are few rows of them.
    per_warp = 512 if x.dim() == 2 else 128
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        total,
        out if scale is None else scale,
        width,
        x.stride(-2),
        x.stride(0),
        eps,
        weight_offset,
        PARTS=x.shape[0] if x.dim() == 3 else 1,
        HAS_RESIDUAL=residual is not None,
        QUANTIZED=scale is not None,
        BLOCK=block,
        num_warps=max(1, min(16, block // per_warp)),
        **launch_options(),
    )
