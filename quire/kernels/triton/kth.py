"""The k-th highest number of a row, bit by bit: no sort, and the same whatever the order of its numbers.

Numbers of float32 are ordered as integers of 32 bits. A bit of the k-th highest is set if at least k numbers are not
below the one with that bit and the bits found before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.noise import load_scaled

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # stands for minus infinity, below which there are no numbers


@triton.jit
def _number(key):
    """The number that is the key-th of all, the key in [0, 2^32)."""
    flipped = (key - 2147483648).to(tl.int32)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _or_infinite(x):
    return tl.where(x <= _LOWEST, float("-inf"), x)


@triton.jit
def kth_of(x, taken, k):
    """(the k-th highest of those of x that are taken, how many of its equals belong to the first k)."""
    x = tl.where(taken, tl.maximum(x, _LOWEST), float("-inf"))
    key = tl.zeros([], tl.int64)
    step = tl.full([], 1 << 31, tl.int64)
    while step > 0:
        reached = tl.sum((x >= _number(key + step)).to(tl.int32), axis=0)
        key = tl.where(reached >= k, key + step, key)
        step = step >> 1
    value = _number(key)
    return _or_infinite(value), k - tl.sum((x > value).to(tl.int32), axis=0)


@triton.jit
def _count_line(line_ptr, vocab_size, temperature, bound, BLOCK: tl.constexpr):
    """How many of a row's logits, divided by the temperature, are not below the bound, and above it."""
    reached = tl.zeros([], tl.int32)
    above = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.maximum(load_scaled(line_ptr, tokens, vocab_size, temperature), _LOWEST)
        x = tl.where(tokens < vocab_size, x, float("-inf"))
        reached += tl.sum((x >= bound).to(tl.int32), axis=0)
        above += tl.sum((x > bound).to(tl.int32), axis=0)
    return reached, above


@triton.jit
def kth_of_line(line_ptr, vocab_size, temperature, k, BLOCK: tl.constexpr):
    """The same of a row of logits divided by the temperature, which is read once for each bit."""
    key = tl.zeros([], tl.int64)
    step = tl.full([], 1 << 31, tl.int64)
    while step > 0:
        reached, _ = _count_line(line_ptr, vocab_size, temperature, _number(key + step), BLOCK)
        key = tl.where(reached >= k, key + step, key)
        step = step >> 1
    value = _number(key)
    _, above = _count_line(line_ptr, vocab_size, temperature, value, BLOCK)
    return _or_infinite(value), k - above


@triton.jit
def kth_by_groups(
    line_ptr,
    group_highest_ptr,  # [groups] float32: the highest logit of each group of tokens
    found_ptr,  # [MOST] int32: room for groups
    vocab_size,
    temperature,
    num_groups,
    k,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
):
    """The same for k up to MOST and the number of groups: but a few tokens are read.

    The k-th highest token is not below the k-th highest of all groups' highest. Tokens above that are in groups whose
    highest is above it, and there are less than k of those.
    """
    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    highest = load_scaled(group_highest_ptr, groups, num_groups, temperature)
    bound, _ = kth_of(highest, inside, k)
    above = inside & (highest > bound)
    slots = tl.cumsum(above.to(tl.int32), axis=0) - 1
    tl.store(found_ptr + slots, groups, mask=above)
    tl.debug_barrier()
    places = tl.arange(0, MOST)
    known = places < tl.sum(above.to(tl.int32), axis=0)
    group = tl.load(found_ptr + places, mask=known, other=num_groups)
    tokens = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [MOST * GROUP])
    x = load_scaled(line_ptr, tokens, vocab_size, temperature)
    taken = (tokens < vocab_size) & (x > bound)
    count = tl.sum(taken.to(tl.int32), axis=0)
    value, equals = kth_of(x, taken, k)
    is_bound = count < k
    return tl.where(is_bound, bound, value), tl.where(is_bound, k - count, equals)
