"""What the routed experts and a shared one give, added up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options


@triton.jit
def _add_shared_kernel(
    routed_ptr,
    shared_ptr,
    gate_ptr,  # [n]
    out_ptr,
    WIDTH,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_GATE:
        shared = shared / (1.0 + tl.exp(-tl.load(gate_ptr + row).to(tl.float32)))
    out = tl.load(routed_ptr + at, mask=inside, other=0.0).to(tl.float32) + shared
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
    """routed + shared, both [n, width] and contiguous; with gate [n, 1] routed + sigmoid(gate) * shared."""
    rows, width = routed.shape
    out = torch.empty_like(routed)
    if rows == 0:
        return out
    block = min(1024, int(triton.next_power_of_2(width)))
    _add_shared_kernel[(rows, triton.cdiv(width, block))](
        routed,
        shared,
        routed if gate is None else gate,
        out,
        width,
        HAS_GATE=gate is not None,
        BLOCK=block,
        num_warps=4,
        **launch_options(),
    )
    return out
