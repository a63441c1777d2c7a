"""What ranks have, added up in one kernel, in the order and with the bits of additions one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_BLOCK = 1024


@triton.jit
def _tree(parts_ptr, at, inside, SIZE, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The sum of parts [FIRST, FIRST + COUNT), halved again and again; each sum is rounded to the parts' type."""
    if COUNT == 1:
        return tl.load(parts_ptr + FIRST * SIZE + at, mask=inside, other=0.0)
    else:
        left = _tree(parts_ptr, at, inside, SIZE, FIRST, COUNT // 2)
        right = _tree(parts_ptr, at, inside, SIZE, FIRST + COUNT // 2, COUNT - COUNT // 2)
        return (left.to(tl.float32) + right.to(tl.float32)).to(parts_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["size"])
def _rank_sum_kernel(parts_ptr, out_ptr, size, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_dependent(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out_ptr + at, _tree(parts_ptr, at, inside, size.to(tl.int64), 0, RANKS), mask=inside)


def rank_sum(parts: Tensor) -> Tensor:
    """The sum of parts [ranks, ...], contiguous: a tree over the ranks, as the CPU's collectives add."""
    out = torch.empty_like(parts[0])
    size = out.numel()
    if size:
        _rank_sum_kernel[(triton.cdiv(size, _BLOCK),)](
            parts, out, size, RANKS=parts.shape[0], BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return out
