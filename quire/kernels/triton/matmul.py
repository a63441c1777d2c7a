"""Matmuls with a weight [out_features, in_features]: which kernel for how many rows, and the one for a single row.

Matmuls of few rows are bound by reading the weight. One row uses multiply-and-add over long contiguous pieces, a
few rows tiles; many rows are left to the library. Own kernels can do the gated activation after a matmul, too, and
leave an inner sum that is split over programs to the kernel that reads the matmul next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import GATED as ACTIVATIONS
from quire.kernels.triton.activation import gate_times_up
from quire.kernels.triton.launch import allow_dependents, launch_options, wait_for_predecessor
from quire.kernels.triton.lora import shrink_lora
from quire.kernels.triton.shrink_beside import Beside, beside_arguments, num_programs, room_of, shrink_row
from quire.kernels.triton.tile_matmul import TileShape, lines_of, matmul_tiles
from quire.kernels.triton.wide_matmul import matmul_wide, wide_fits


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    down_ptr,  # what is shrunk beside it, see shrink_beside.py
    slots_ptr,
    ranks_ptr,
    shrunk_ptr,
    N,
    K,
    lines_of_one,
    RANK: tl.constexpr,
    SHRINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0)
    if SHRINKS:
        beside = tl.cdiv(lines_of_one, ROWS)
        if place < beside:
            shrink_row(
                x_ptr, down_ptr, slots_ptr, ranks_ptr, shrunk_ptr, place, K, lines_of_one, RANK, ROWS, COLS, PDL
            )
            return
        place -= beside
    allow_dependents(PDL)
    lines, outputs, width = lines_of(place, N, ROWS, GATED)
    inner = tl.arange(0, COLS)
    inside = outputs < width
    at = weight_ptr + lines.to(tl.int64)[:, None] * K + inner[None, :]
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
        out += tl.load(bias_ptr + lines, mask=inside, other=0.0).to(tl.float32)
    if GATED:  # of what the matmul alone would be, rounded
        gate, up = tl.split(tl.reshape(out.to(out_ptr.dtype.element_ty).to(tl.float32), [ROWS // 2, 2]))
        out = gate_times_up(gate, up, GELU)
        outputs = place * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(out_ptr + outputs, out.to(out_ptr.dtype.element_ty), mask=outputs < width)


def matmul_one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    rows: int = 4,
    cols: int = 1024,
    num_warps: int = 4,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    beside: Beside | None = None,
) -> Tensor:
    """x [1, K] @ weight [N, K].T + bias -> [1, N], or [1, N / 2] with an activation. A program has `rows` lines."""
    n, k = weight.shape
    out = torch.empty(1, n if activation is None else n // 2, dtype=out_dtype or x.dtype, device=x.device)
    down, slots, ranks, shrunk, _, lines = beside_arguments(beside, out)
    _one_row_kernel[(triton.cdiv(n, rows) + num_programs(beside, rows, 0),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        down,
        slots,
        ranks,
        shrunk,
        n,
        k,
        lines,
        RANK=room_of(beside),
        SHRINKS=beside is not None,
        HAS_BIAS=bias is not None,
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
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
_LINES = 64  # of the weight in a tile
_TOKENS = 64  # in a tile, at most, where a matmul stays in parts
_PIECE = 128  # of the inner dimension
_PROGRAMS = 128  # that run at a time, about one on each multiprocessor
_MAX_PARTS = 8
_MAX_WIDE_ROWS = 192
# Wider weights, such as heads over a vocabulary, are read at full speed by the library.
_WIDE = 1 << 16


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: object = None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias: own kernels where the library leaves bandwidth unused, else the library."""
    rows = x.shape[0]
    if rows == 1:
        return matmul_one_row(x, weight, bias, rows=_lines_of_one_row(weight))
    shape = _whole_shape(x, weight)
    if shape is None:
        return torch.nn.functional.linear(x, weight, bias)
    return matmul_tiles(x, weight, bias, shape=shape, counters=arrival_counters(x.device))


def _lines_of_one_row(weight: Tensor) -> int:
    n, k = weight.shape
    return 1 if (n * k < 1 << 23 and n < 2048) or k > 8192 else 2


def _whole_shape(x: Tensor, weight: Tensor) -> TileShape | None:
    """None: the library."""
    rows, (n, k) = x.shape[0], weight.shape
    if not _takes_tiles(x, weight):
        return None
    return few_rows_shape(rows, n) if rows <= _MAX_FEW_ROWS else some_rows_shape(rows, n, k)


def linear_shrinking(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    slots: Tensor,
    tiles: Tensor,
    ranks: Tensor,
    in_parts: bool,
) -> tuple[Tensor, Tensor]:
    """See quire/ops/lora.py. With few rows the shrinking is beside the matmul, in one launch."""
    rows, splits = x.shape[0], _parts_shape(x, weight) if in_parts else None
    shape = splits or _whole_shape(x, weight)
    if rows > _MAX_FEW_ROWS or (rows > 1 and shape is None) or down.shape[2] & (down.shape[2] - 1):
        shrunk = shrink_lora(x, down, tiles, ranks)
        whole = linear_split_k(x, weight, bias) if in_parts else linear_transposed(x, weight, bias).unsqueeze(0)
        return whole, shrunk
    lines = down.shape[1] * down.shape[2]
    shrunk = torch.empty(shape.splits if rows > 1 and shape else 1, rows, lines, dtype=torch.float32, device=x.device)
    beside = Beside(down, slots, ranks, shrunk)
    if rows == 1:
        return matmul_one_row(x, weight, bias, rows=_lines_of_one_row(weight), beside=beside).unsqueeze(0), shrunk
    assert shape is not None
    counters = arrival_counters(x.device)
    out = matmul_tiles(x, weight, bias, shape=shape, counters=counters, in_parts=splits is not None, beside=beside)
    return out if splits else out.unsqueeze(0), shrunk


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The same with a gated activation after it: x [n, K], weight [2 * N, K] -> [n, N]."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows == 1:
        lines, piece = (8, 512) if k <= 2048 else (4, 1024)
        return matmul_one_row(x, weight, bias, lines, piece, activation=activation)
    shape = None
    if _takes_tiles(x, weight):
        shape = few_rows_shape(rows, n) if rows <= _MAX_FEW_ROWS else some_rows_gated_shape(rows, n, k)
    if shape is None:
        return ACTIVATIONS[activation](linear_transposed(x, weight, bias))
    counters = arrival_counters(x.device)
    return matmul_tiles(x, weight, bias, shape=shape, counters=counters, activation=activation)


def linear_split_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias as float32 [parts, n, N], or whole as [1, n, N] in x's type."""
    rows, (n, k) = x.shape[0], weight.shape
    shape = _parts_shape(x, weight)
    if shape is not None:
        return matmul_tiles(x, weight, bias, shape=shape, in_parts=True)
    splits = parts_of(rows, n, k) if _takes_tiles(x, weight) else 1
    if splits > 1 and wide_fits(x, weight):
        return matmul_wide(x, weight, bias, splits)
    return linear_transposed(x, weight, bias).unsqueeze(0)


def _parts_shape(x: Tensor, weight: Tensor) -> TileShape | None:
    """Tiles of a matmul that stays in parts; None: it stays whole, or others cut it."""
    rows, (n, k) = x.shape[0], weight.shape
    splits = parts_of(rows, n, k) if _takes_tiles(x, weight) else 1
    if splits == 1 or (rows > _MAX_FEW_ROWS and n * k > _SMALL):
        return None
    return TileShape(splits, bt=_TOKENS if rows > _TOKENS else 0)


def split_k_shape(rows: int, weight: Tensor) -> TileShape:
    """How to cut a matmul of at most 256 rows with a small weight whose parts are left to the reader."""
    return TileShape(parts_of(rows, *weight.shape), bt=_TOKENS if rows > _TOKENS else 0)


def _takes_tiles(x: Tensor, weight: Tensor) -> bool:
    n, k = weight.shape
    few = x.shape[0] <= _MAX_SOME_ROWS and n <= _WIDE
    return few and k >= 1024 and k % _PIECE == 0 and x.element_size() == 2


def few_rows_shape(rows: int, n: int) -> TileShape:
    """How to cut a matmul of 2 to 64 rows; measured on an H200.

    The inner sum is split where there are fewer tiles of outputs than multiprocessors. The next weights are asked
    for the earlier, the less one kernel alone keeps the memory busy.
    """
    tiles = triton.cdiv(n, _LINES)
    if tiles < 96:
        return TileShape(splits=4 if rows <= 16 or tiles <= 16 else 2)
    if rows > 16 and tiles > 256:
        return TileShape(bn=128, bk=64, num_warps=8, num_stages=5)
    if rows <= 16 and tiles <= 256:
        return TileShape(num_stages=6, prefetch=4)
    return TileShape()


def some_rows_shape(rows: int, n: int, k: int) -> TileShape | None:
    """How to cut a matmul of 65 to 256 rows; None: the library is faster. Measured on an H200, in a chain.

    With a small weight most of a matmul is its start, which here overlaps the end of the kernel before.
    """
    tiles = triton.cdiv(n, _LINES)
    if n * k > _SMALL or (rows > 128 and tiles > 64):
        return None
    if tiles <= 32:
        return TileShape(bt=64, splits=4 if rows <= 128 else 2)
    if rows > 128:
        return TileShape(bt=128, num_warps=8, num_stages=3)
    return TileShape(bt=64) if tiles <= 64 else TileShape(bt=128, bk=64, num_stages=6)


def some_rows_gated_shape(rows: int, n: int, k: int) -> TileShape | None:
    """The same where the activation follows, which is a launch less."""
    is_small = n * k <= _SMALL
    if rows > 128 and not is_small:
        return None
    bt = 64 if rows <= 128 and is_small else 128
    return TileShape(bt=bt, bn=128, bk=64, num_warps=8, num_stages=5)


def parts_of(rows: int, n: int, k: int) -> int:
    """How many parts a matmul may stay in; 1: whole is as fast. Measured on an H200, in a chain with norms.

    Parts that nobody waits for are cheap: as many as fill the device once.
    """
    is_small = n * k <= _SMALL
    if rows <= 1 or (rows > _MAX_WIDE_ROWS and not is_small):
        return 1
    tiles: int = triton.cdiv(n, _LINES) * (triton.cdiv(rows, _TOKENS) if is_small else 1)
    return max(1, min(_MAX_PARTS, _PROGRAMS // tiles))


def arrival_counters(device: torch.device) -> Tensor:
    """One set of arrival counters per device: launches run one after the other and leave them zero."""
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(1 << 14, dtype=torch.int32, device=device)
    return _COUNTERS[device]
