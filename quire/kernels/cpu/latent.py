"""The matrices of single heads over tensors: float32 activations, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty

# As latent.cpp numbers them; int8: codes and scales, see ops/latent.py.
UP_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, heads, in], the last dimension contiguous, times weight [heads, in, out] -> [n, heads, out]."""
    out = empty(x.shape[0], x.shape[1], weight.shape[2])
    per_head_into(x, weight, out)
    return out


def per_head_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Into the first of the last dimension of out [n, heads, at least as many as outputs]."""
    tokens, heads, inner = x.shape
    bound().per_head(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        weight.data_ptr(),
        UP_TYPES[weight.dtype],
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        tokens,
        heads,
        inner,
        weight.shape[2],
    )
