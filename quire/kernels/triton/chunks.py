"""What kernels over chunks of recurrent layers share; see chunked_states.py."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 64
SLOT = 16  # a row of n > STATE_SHORT tokens has at most n / SLOT chunks
LEAST_LOG = -87.0  # of a decay: below it float32 has none


@triton.jit
def find_chunk(slot, contexts_ptr, starts_ptr, num_rows, CHUNK: tl.constexpr, SLOT: tl.constexpr, ROWS: tl.constexpr):
    """(first token of a row in the step, tokens of it in the step, tokens before them, place of its chunk there).

    The chunk is there if it begins before the row ends.
    """
    index = -1
    for start in range(0, num_rows, ROWS):
        places = start + tl.arange(0, ROWS)
        begins = tl.load(starts_ptr + places, mask=places < num_rows, other=2147483647)
        index += tl.sum((begins // SLOT <= slot).to(tl.int32), axis=0)
    begin = tl.load(starts_ptr + index)
    count = tl.load(starts_ptr + index + 1) - begin
    first = tl.load(contexts_ptr + index) - count
    return begin, count, first, first // CHUNK + slot - begin // SLOT


@triton.jit
def as_logs(decays, LEAST: tl.constexpr):
    return tl.maximum(tl.log(tl.maximum(decays, 1.2e-38)), LEAST)


@triton.jit
def store_strong_values(
    inverse,
    strength,
    token,
    inside,
    values_ptr,
    value_stride,
    u_ptr,
    head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """U of the delta rule: the inverse times strengths [CHUNK, 1] times the values of a chunk's tokens."""
    columns = tl.arange(0, VALUES)
    mask = inside[:, None] & (columns < VALUE_DIM)[None, :]
    of_value = head * VALUE_DIM + columns[None, :]
    value = tl.load(values_ptr + token[:, None] * value_stride + of_value, mask=mask, other=0.0)
    strong = (value.to(tl.float32) * strength).to(inverse.dtype)
    u = tl.dot(inverse, strong, input_precision=PRECISION)
    tl.store(u_ptr + token[:, None] * (HEADS * VALUE_DIM) + of_value, u.to(inverse.dtype), mask=mask)


@triton.jit
def _precise_dot(a, b, kind: tl.constexpr):
    """a times b, both float32: in float32 arithmetic, or as sums of two numbers of 16 bits each.

    Not with tf32: Triton 3.6 gives wrong numbers for other blocks than the first of an inverse on Hopper.
    """
    if kind == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    high_a, high_b = a.to(kind), b.to(kind)
    low_a, low_b = (a - high_a.to(tl.float32)).to(kind), (b - high_b.to(tl.float32)).to(kind)
    return tl.dot(high_a, high_b, tl.dot(high_a, low_b, tl.dot(low_a, high_b)))


@triton.jit
def inverse_of(a, kind: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Of I + a [CHUNK, CHUNK], which is zero on and above its diagonal; blocks double in each round.

    `kind`: the type that it will be rounded to.
    """
    rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0) - tl.where(rows // 2 == columns // 2, a, 0.0)
    for power in range(1, LEVELS):
        below = (rows >> (power + 1) == columns >> (power + 1)) & (rows >> power != columns >> power)
        part = _precise_dot(tl.where(below, a, 0.0), inverse, kind)
        inverse -= _precise_dot(inverse, part, kind)
    return inverse
