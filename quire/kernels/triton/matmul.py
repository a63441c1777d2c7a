"""Products of few rows with a weight: bound by reading the weight, so laid out to read it at full speed.

Weights are [out_features, in_features]. One row uses multiply-and-add over long contiguous pieces; a few rows use
matrix units, the inner dimension split over several programs whose parts the last one to finish adds in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    allow_dependents,
    begin_dependent,
    launch_options,
    wait_for_predecessor,
)


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, COLS)
    inside = outputs < N
    at = weight_ptr + outputs.to(tl.int64)[:, None] * K + inner[None, :]
    # Weights do not depend on the kernel before: the first piece is on its way while that one still runs.
    w = tl.load(at, mask=inside[:, None] & (inner < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(PDL)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, K, COLS):
        x = tl.load(x_ptr + start + inner, mask=start + inner < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        present = start + COLS + inner < K
        w = tl.load(
            at + start + COLS, mask=inside[:, None] & present[None, :], other=0.0, eviction_policy="evict_first"
        )
    out = tl.sum(acc, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,  # [splits, M, N] float32
    counters_ptr,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    k_per_split,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BM)
    outputs = tile * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    row_mask = rows < M
    out_mask = outputs < N
    begin = split * k_per_split
    end = tl.minimum(begin + k_per_split, K)
    acc = tl.zeros([BM, BN], tl.float32)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * K + inner[None, :]
    w_at = weight_ptr + outputs.to(tl.int64)[None, :] * K + inner[:, None]
    for start in range(begin, end, BK):
        present = start + inner < end
        x = tl.load(x_at + start, mask=row_mask[:, None] & present[None, :], other=0.0)
        w = tl.load(w_at + start, mask=out_mask[None, :] & present[:, None], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * N + outputs[None, :]
    mask = row_mask[:, None] & out_mask[None, :]
    if SPLITS > 1:
        tl.store(parts_ptr + split * (M * N).to(tl.int64) + at, acc, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLITS - 1:
            return
        acc = tl.zeros([BM, BN], tl.float32)
        for other in range(SPLITS):
            acc += tl.load(parts_ptr + other * (M * N).to(tl.int64) + at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=out_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def matmul_one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: int = 4, cols: int = 1024, num_warps: int = 4
) -> Tensor:
    """x [1, K] @ weight [N, K].T + bias -> [1, N]."""
    n, k = weight.shape
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(n, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        n,
        k,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLS=cols,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


def matmul_few_rows(
    x: Tensor,
    weight: Tensor,
    counters: Tensor,
    bias: Tensor | None = None,
    splits: int = 1,
    bn: int = 32,
    bk: int = 128,
    num_warps: int = 4,
    num_stages: int = 4,
) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias -> [M, N] for M up to 128. `counters`: zeros, int32, at least N / bn."""
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else out
    k_per_split = triton.cdiv(triton.cdiv(k, splits), bk) * bk
    _few_rows_kernel[(triton.cdiv(n, bn), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        counters,
        m,
        n,
        k,
        k_per_split,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        BM=max(16, triton.next_power_of_2(m)),
        BN=bn,
        BK=bk,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch_options(),
    )
    return out


_COUNTERS: dict[torch.device, Tensor] = {}
_MAX_FEW_ROWS = 64


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: object = None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias: own kernels where the library leaves bandwidth unused, else the library."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows == 1:
        few_outputs = n * k < 1 << 23 and n <= 2048
        return matmul_one_row(x, weight, bias, rows=1 if few_outputs or k > 8192 else 2)
    # Measured on an H200: the library reads wide weights at full speed; narrow ones need the inner sum split up.
    if rows <= _MAX_FEW_ROWS and n <= 2048 and k >= 1024:
        splits = 8 if rows <= 16 else 4
        return matmul_few_rows(x, weight, _counters(x.device), bias, splits=splits)
    return torch.nn.functional.linear(x, weight, bias)


def _counters(device: torch.device) -> Tensor:
    """One set of arrival counters per device: launches run one after the other and leave them zero."""
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(1 << 14, dtype=torch.int32, device=device)
    return _COUNTERS[device]
