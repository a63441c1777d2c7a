"""Gated activations: act(gate) * up from one [n, 2 * width] buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_BLOCK = 1024


@triton.jit
def _gated_kernel(x_ptr, out_ptr, width, x_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    inner = -gate
    if GELU:
        inner = -1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)  # -2 * sqrt(2 / pi) * ...
    out = gate / (1.0 + tl.exp(inner)) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, width, gate_up.stride(0), GELU=gelu, BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return out
