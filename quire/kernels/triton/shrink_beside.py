"""LoRA's shrinking beside a layer's own matmul: programs in front of those of the matmul, in one launch.

Both read the same activations, and the adapters' matrices are lines of a weight like any other: only lines of
adapters that some token has are read. A launch less for each layer, and the memory stays busy.

These programs let the next kernel start once all kernels before are done, as `lora.py` wants it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import allow_dependents, wait_for_predecessor


class Beside(NamedTuple):
    """What is shrunk beside a matmul."""

    down: Tensor  # [slots, pieces, max_rank, K]
    slots: Tensor  # [n] int32: of each token; -1: none
    ranks: Tensor  # [slots] int32
    shrunk: Tensor  # [splits, n, pieces * max_rank] float32, to be filled


@triton.jit
def shrink_tile(
    x_ptr, down_ptr, slots_ptr, ranks_ptr, shrunk_ptr, tile, token_tile, split,
    M, K, begin, end, num_lines, lines,
    RANK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One split of BN lines of all adapters' matrices, for the tokens of a tile that have these adapters."""
    wait_for_predecessor(PDL)
    allow_dependents(PDL)
    tokens, index, inner = token_tile * BT + tl.arange(0, BT), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    inside = index < num_lines
    owner, line = index // lines, index % lines
    rank = tl.load(ranks_ptr + owner, mask=inside, other=0)
    slots = tl.load(slots_ptr + tokens, mask=tokens < M, other=-1)
    pairs = (owner[:, None] == slots[None, :]) & (inside & (line % RANK < rank))[:, None]
    wanted = tl.max(pairs.to(tl.int32), axis=1)
    if tl.max(wanted) > 0:
        w_at = down_ptr + index.to(tl.int64)[:, None] * K + (begin + inner)[None, :]
        x_at = x_ptr + tl.minimum(tokens, M - 1).to(tl.int64)[None, :] * K + (begin + inner)[:, None]
        acc = tl.zeros([BN, BT], tl.float32)
        for start in range(begin, end, BK):
            present = start + inner < end
            w = tl.load(w_at, mask=(wanted > 0)[:, None] & present[None, :], other=0.0)
            x = tl.load(x_at, mask=(tokens < M)[None, :] & present[:, None], other=0.0)
            acc = tl.dot(w, x.to(w.dtype), acc, input_precision=PRECISION)
            w_at += BK
            x_at += BK
        at = (split.to(tl.int64) * M + tokens[None, :]) * lines + line[:, None]
        tl.store(shrunk_ptr + at, acc, mask=pairs)


@triton.jit
def shrink_row(
    x_ptr, down_ptr, slots_ptr, ranks_ptr, shrunk_ptr, tile, K, lines,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for one token, whose adapter's lines are the only ones."""
    wait_for_predecessor(PDL)
    allow_dependents(PDL)
    line, inner = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    slot = tl.load(slots_ptr)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    wanted = (line < lines) & (line % RANK < rank)
    if tl.max(wanted.to(tl.int32)) > 0:
        at = down_ptr + (slot.to(tl.int64) * lines + line)[:, None] * K + inner[None, :]
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, K, COLS):
            present = start + inner < K
            x = tl.load(x_ptr + start + inner, mask=present, other=0.0).to(tl.float32)
            acc += tl.load(at + start, mask=wanted[:, None] & present[None, :], other=0.0).to(tl.float32) * x[None, :]
        tl.store(shrunk_ptr + line, tl.sum(acc, axis=1), mask=wanted)


def beside_arguments(beside: Beside | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """As kernels take them: matrices, slots, ranks, result, lines of all adapters, lines of one."""
    if beside is None:
        return unused, unused, unused, unused, 0, 1
    num_slots, pieces, room, _ = beside.down.shape
    lines = pieces * room
    return beside.down, beside.slots, beside.ranks, beside.shrunk, num_slots * lines, lines


def room_of(beside: Beside | None) -> int:
    return 1 if beside is None else beside.down.shape[2]


def num_programs(beside: Beside | None, lines: int, token_tiles: int = 1) -> int:
    """That come before those of the matmul, `lines` lines each; one token has the lines of one adapter."""
    if beside is None:
        return 0
    num_slots, pieces, room, _ = beside.down.shape
    adapters = num_slots if token_tiles else 1
    return int(triton.cdiv(adapters * pieces * room, lines)) * max(1, token_tiles)
