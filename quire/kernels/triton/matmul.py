"""Products with a weight [out_features, in_features]: which kernel for how many rows, and the one for a single row.

Products of few rows are bound by reading the weight. One row uses multiply-and-add over long contiguous pieces, a
few rows tiles; many rows are left to the library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import allow_dependents, launch_options, wait_for_predecessor
from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_scale_ptr,  # [1] float32
    weight_scale_ptr,  # [N] float32
    N,
    K,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
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
    if SCALED:
        out = out * tl.load(x_scale_ptr) * tl.load(weight_scale_ptr + outputs, mask=inside, other=0.0)
    if HAS_BIAS:
        out += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, out.to(out_ptr.dtype.element_ty), mask=inside)


def matmul_one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    rows: int = 4,
    cols: int = 1024,
    num_warps: int = 4,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [1, K] @ weight [N, K].T + bias -> [1, N]. `scales`: x's [1] and those of the weight's lines [N], float32."""
    n, k = weight.shape
    out = torch.empty(1, n, dtype=out_dtype or x.dtype, device=x.device)
    x_scale, weight_scale = (out, out) if scales is None else scales
    _one_row_kernel[(triton.cdiv(n, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x_scale,
        weight_scale,
        n,
        k,
        HAS_BIAS=bias is not None,
        SCALED=scales is not None,
        ROWS=rows,
        COLS=cols,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


_COUNTERS: dict[torch.device, Tensor] = {}
_MAX_FEW_ROWS = 64
_MAX_SOME_ROWS = 256
_SMALL = 1 << 23  # elements of a weight that is read faster than the library starts
_OUTPUTS = 64  # of a tile
_PIECE = 128  # of the inner dimension
# Wider weights, such as heads over a vocabulary, are read at full speed by the library.
_WIDE = 1 << 16


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: object = None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias: own kernels where the library leaves bandwidth unused, else the library."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows == 1:
        few_outputs = n * k < 1 << 23 and n <= 2048
        return matmul_one_row(x, weight, bias, rows=1 if few_outputs or k > 8192 else 2)
    if rows <= _MAX_SOME_ROWS and n <= _WIDE and k >= 1024 and k % _PIECE == 0 and x.element_size() == 2:
        shape = few_rows_shape(rows, n) if rows <= _MAX_FEW_ROWS else some_rows_shape(rows, n, k)
        if shape is not None:
            return matmul_tiles(x, weight, bias, shape=shape, counters=arrival_counters(x.device))
    return torch.nn.functional.linear(x, weight, bias)


def few_rows_shape(rows: int, n: int) -> TileShape:
    """How to cut a product of 2 to 64 rows; measured on an H200.

    The inner sum is split where there are fewer tiles of outputs than multiprocessors. The next weights are asked
    for the earlier, the less one kernel alone keeps the memory busy.
    """
    tiles = triton.cdiv(n, _OUTPUTS)
    if tiles < 96:
        return TileShape(splits=4 if rows <= 16 or tiles <= 16 else 2)
    if rows > 16 and tiles > 256:
        return TileShape(bn=128, bk=64, num_warps=8, num_stages=5)
    if rows <= 16 and tiles <= 256:
        return TileShape(num_stages=6, prefetch=4)
    return TileShape()


def some_rows_shape(rows: int, n: int, k: int) -> TileShape | None:
    """How to cut a product of 65 to 256 rows; None: the library is faster. Measured on an H200, in a chain.

    With a small weight most of a product is its start, which here overlaps the end of the kernel before.
    """
    tiles = triton.cdiv(n, _OUTPUTS)
    if n * k > _SMALL or (rows > 128 and tiles > 64):
        return None
    if tiles <= 32:
        return TileShape(bt=64, splits=4 if rows <= 128 else 2)
    if rows <= 128 and tiles <= 64:
        return TileShape(bt=64)
    return TileShape(bt=128, bk=64, num_stages=6)


def arrival_counters(device: torch.device) -> Tensor:
    """One set of arrival counters per device: launches run one after the other and leave them zero."""
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(1 << 14, dtype=torch.int32, device=device)
    return _COUNTERS[device]
