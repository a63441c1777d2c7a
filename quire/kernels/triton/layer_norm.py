"""Layer normalization, of a tensor or of its sum with a residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import allow_dependents, launch_options, wait_for_predecessor


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    width,
    x_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(sum_ptr.dtype.element_ty)  # what the next layer adds to is what is normalized here
        tl.store(sum_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    out = centred * scale * weight + bias
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [n, width], the last dimension contiguous."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, bias, out, out, eps)
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual); both [n, width]."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, weight, bias, out, total, eps)
    return out, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor, total: Tensor, eps: float
) -> None:
    rows, width = out.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _layer_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        bias,
        out,
        total,
        width,
        x.stride(0),
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(),
    )
