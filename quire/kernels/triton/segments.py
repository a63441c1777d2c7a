"""The arithmetic of attention over segments of keys: shared by kernels whose results must be equal to the bit.

A query's keys are cut at fixed positions. Within a segment they are taken in piece by piece, KEYS at a time, and the
segments' results are folded in order. Nothing here knows how keys come from memory, and no sum depends on how a
compiler lays out its operands: matmuls add along the inner dimension in one order, and all other sums are spelt out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import first_seen


@triton.jit
def nothing(LINES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Highest scores, sums of weights and weighted values of a segment before any key."""
    highest = tl.full([LINES], float("-inf"), tl.float32)
    COLUMNS: tl.constexpr = 32 if KEYS > 32 else KEYS
    return highest, tl.zeros([LINES, COLUMNS], tl.float32), tl.zeros([LINES, DIM], tl.float32)


@triton.jit
def take_in(
    q,
    k,
    v,
    positions,
    first_position,
    start,
    highest,
    totals,
    acc,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A segment's highest scores, sums of weights and weighted values with the keys [start, start + KEYS) added.

    q [LINES, dim] stands at `positions`, none of them before first_position. Exponentials are in base 2.
    """
    keys = start + tl.arange(0, KEYS)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    to_base_2 = scale * 1.4426950408889634
    if HAS_CAP:
        scores = soft_cap - 2.0 * soft_cap / (tl.exp(scores * (scale * 2.0 / soft_cap)) + 1.0)
        to_base_2 = 1.4426950408889634
    if start + KEYS > first_position:
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    if WINDOW != 0:
        scores = tl.where(keys[None, :] >= first_seen(positions, WINDOW)[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * to_base_2)
    # A query may see none of these keys: exp(-inf - -inf) must not become NaN.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(tl.fma(scores, to_base_2 + tl.zeros_like(scores), tl.zeros_like(scores) - shift[:, None]))
    decay = tl.exp2(highest - shift)
    totals = tl.fma(totals, decay[:, None] + tl.zeros_like(totals), _column_sums(weights, LINES, KEYS))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_highest, totals, acc


@triton.jit
def fold(whole_highest, whole_total, whole, highest, total, acc):
    """The results of the segments so far, with those of the next one: highest, total [LINES] and acc [LINES, dim]."""
    both = tl.maximum(whole_highest, highest)
    shift = tl.where(both == float("-inf"), 0.0, both)
    keep, add = tl.exp2(whole_highest - shift), tl.exp2(highest - shift)
    whole = tl.fma(whole, keep[:, None] + tl.zeros_like(whole), acc * add[:, None])
    return both, tl.fma(whole_total, keep, total * add), whole


@triton.jit
def line_sums(totals, LINES: tl.constexpr, KEYS: tl.constexpr):
    """The sums of weights of a segment, [LINES]."""
    if KEYS >= 32:
        totals = _halves(totals, LINES, 16)
    totals = _halves(_halves(_halves(totals, LINES, 8), LINES, 4), LINES, 2)
    low, high = tl.split(totals)
    return low + high


@triton.jit
def _column_sums(weights, LINES: tl.constexpr, KEYS: tl.constexpr):
    """The sums of columns j, j + 32, j + 64 and so on, which one thread holds in every layout of a matmul."""
    tl.static_assert((KEYS >= 16) and (KEYS <= 128))
    if KEYS >= 128:
        weights = _halves(weights, LINES, 64)
    if KEYS >= 64:
        weights = _halves(weights, LINES, 32)
    return weights


@triton.jit
def _halves(x, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """x [LINES, 2 * WIDTH]: columns j and j + WIDTH added up."""
    low, high = tl.split(tl.permute(tl.reshape(x, [LINES, 2, WIDTH]), [0, 2, 1]))
    return low + high
