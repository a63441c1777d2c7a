"""Matmuls of some rows with a large weight, left in parts: a program has all tokens, so each weight is read once.

The weight is the left operand, as in `tile_matmul`. Both sides come as copies by the tensor memory unit. The tokens
are two tiles side by side, so that their number need not be rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import (
    allow_dependents,
    has_tensor_memory,
    launch_options,
    prefetch_lines,
    shared_memory,
    stages_within,
    wait_for_predecessor,
)

_LINES = 64  # of the weight, in a tile
_MIN_TOKENS = 16
_MAX_TOKENS = 256
_BARRIERS = 1024  # bytes
_MAX_STAGES = 6
_ALIGNMENT = 16  # bytes, of what the copies begin at


@triton.jit
def _wide_kernel(
    first_tokens,  # descriptor of x [M, K], tiles of [FIRST, BK]
    more_tokens,  # the same, tiles of [MORE, BK]
    lines,  # descriptor of the weight [N, K], tiles of [BN, BK]
    weight_ptr,
    bias_ptr,
    out_ptr,  # [splits, M, N] float32
    M,
    N,
    K,
    k_per_split,
    HAS_BIAS: tl.constexpr,
    FIRST: tl.constexpr,
    MORE: tl.constexpr,  # may be 0
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    line = tl.program_id(0) * BN
    split = tl.program_id(1)
    outputs = line + tl.arange(0, BN)
    begin = split * k_per_split
    end = tl.minimum(begin + k_per_split, K)
    if PDL:
        prefetch_lines(weight_ptr, outputs, K, begin, end, N, BK, PREFETCH)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BN, FIRST], tl.float32)
    if MORE > 0:
        more = tl.zeros([BN, MORE], tl.float32)
    for start in range(begin, end, BK):
        w = lines.load([line, start])
        acc = tl.dot(w, first_tokens.load([0, start]).T, acc)
        if MORE > 0:
            more = tl.dot(w, more_tokens.load([FIRST, start]).T, more)
    if HAS_BIAS:  # once in all parts
        bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        bias = tl.where(split == 0, bias, 0.0)[:, None]
        acc += bias
        if MORE > 0:
            more += bias
    out_ptr += split.to(tl.int64) * M * N
    _store(out_ptr, acc, 0, outputs, M, N, FIRST)
    if MORE > 0:
        _store(out_ptr, more, FIRST, outputs, M, N, MORE)


@triton.jit
def _store(out_ptr, acc, first, outputs, M, N, COUNT: tl.constexpr):
    tokens = first + tl.arange(0, COUNT)
    at = tokens.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(out_ptr + at, tl.trans(acc), mask=(tokens < M)[:, None] & (outputs < N)[None, :])


def matmul_wide(x: Tensor, weight: Tensor, bias: Tensor | None, splits: int) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias as [splits, M, N] float32, K being whole pieces of 128, M up to 256."""
    (m, k), n = x.shape, weight.shape[0]
    first, more = _token_tiles(m)
    bk, stages = _pieces(first + more, x.element_size())
    out = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    tokens = _tiles(x, first, bk)
    _wide_kernel[(triton.cdiv(n, _LINES), splits)](
        tokens,
        _tiles(x, more, bk) if more else tokens,
        _tiles(weight, _LINES, bk),
        weight,
        weight if bias is None else bias,
        out,
        m,
        n,
        k,
        triton.cdiv(triton.cdiv(k, splits), bk) * bk,
        HAS_BIAS=bias is not None,
        FIRST=first,
        MORE=more,
        BN=_LINES,
        BK=bk,
        PREFETCH=2,
        num_warps=4,
        num_stages=stages,
        **launch_options(),
    )
    return out


def wide_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether there is such a unit, both can be copied by it, and are not too many tokens."""
    aligned = all(side.is_contiguous() and side.data_ptr() % _ALIGNMENT == 0 for side in (x, weight))
    return aligned and x.shape[0] <= _MAX_TOKENS and x.element_size() == 2 and has_tensor_memory()


def _token_tiles(rows: int) -> tuple[int, int]:
    """Two powers of two whose sum holds this number of tokens; the second may be 0."""
    first = 128 if rows > 96 else 64
    return first, max(_MIN_TOKENS, triton.next_power_of_2(rows - first)) if rows > first else 0


def _pieces(tokens: int, itemsize: int) -> tuple[int, int]:
    """(How much of the inner dimension at a time, how many such pieces there is room for): long ones if four fit."""
    width = (_LINES + tokens) * itemsize
    bk = 128 if 4 * 128 * width <= shared_memory() - _BARRIERS else 64
    return bk, stages_within(_MAX_STAGES, width * bk, _BARRIERS)


def _tiles(lines: Tensor, count: int, bk: int) -> TensorDescriptor:
    return TensorDescriptor(lines, list(lines.shape), [lines.stride(0), 1], [count, bk])
