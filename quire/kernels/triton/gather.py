"""Lines of a table by number: embeddings, rotations, the tokens of a step that are gone on with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_MAX_BLOCK = 4096


@triton.jit
def _gather_lines_kernel(
    table_ptr, indices_ptr, out_ptr, width, PER_LINE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin_dependent(PDL)
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = (tl.load(indices_ptr + line) // PER_LINE).to(tl.int64)
    values = tl.load(table_ptr + source * width + columns, mask=inside)
    tl.store(out_ptr + line * width + columns, values, mask=inside)


@triton.jit
def _rotation_kernel(cos_sin_ptr, positions_ptr, cos_ptr, sin_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_dependent(PDL)
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    half = width // 2
    at = cos_sin_ptr + tl.load(positions_ptr + line).to(tl.int64) * width + columns % half
    cos, sin = tl.load(at, mask=inside), tl.load(at + half, mask=inside).to(tl.float32)
    sin = tl.where(columns < half, -sin, sin)
    tl.store(cos_ptr + line * width + columns, cos.to(cos_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + line * width + columns, sin.to(sin_ptr.dtype.element_ty), mask=inside)


def gather_rows(table: Tensor, indices: Tensor, per_line: int = 1) -> Tensor:
    """table [n, ...], contiguous, at indices [m], of which each line has `per_line`: [m, ...]."""
    out = torch.empty(indices.shape[0], *table.shape[1:], dtype=table.dtype, device=table.device)
    if out.numel():
        width = out[0].numel()
        block = min(_MAX_BLOCK, triton.next_power_of_2(width))
        grid = (indices.shape[0], triton.cdiv(width, block))
        _gather_lines_kernel[grid](
            table, indices, out, width, PER_LINE=per_line, BLOCK=block, num_warps=4, **launch_options()
        )
    return out


def gather_rotation(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos_sin [length, width] float32, cosines and then sines -> cos and sign-folded sin [n, 1, width] in `dtype`."""
    count, width = positions.shape[0], cos_sin.shape[1]
    cos, sin = torch.empty(2, count, 1, width, dtype=dtype, device=cos_sin.device).unbind(0)
    if count:
        block = triton.next_power_of_2(width)
        _rotation_kernel[(count,)](cos_sin, positions, cos, sin, width, BLOCK=block, num_warps=1, **launch_options())
    return cos, sin
