"""The k-th highest number of a row, digit by digit: no sort, and the same whatever the order of its numbers.

A number of float32 is taken as an integer of four digits in the same order. Each digit of the one that is looked for
is known from how many numbers have which digit there, among those that agree with it in the digits before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.noise import load_scaled

_DIGITS = tl.constexpr(256)


@triton.jit
def _keys(x):
    """float32 as int64 in [0, 2^32), in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.int64) + 2147483648


@triton.jit
def _number(key):
    flipped = (key - 2147483648).to(tl.int32)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _counts(x, taken, prefix, LEVEL: tl.constexpr):
    """How many of x have which digit at this level, of those that begin with the digits in `prefix`."""
    keys = _keys(x)
    agree = (keys >> (32 - 8 * LEVEL)) == prefix
    return tl.histogram(((keys >> (24 - 8 * LEVEL)) & 255).to(tl.int32), _DIGITS, mask=taken & agree)


@triton.jit
def _next_digit(counts, prefix, k):
    """(the prefix with one more digit, k among those that begin with it)"""
    digits = tl.arange(0, _DIGITS)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.max(tl.where(at_least >= k, digits, 0), axis=0)
    return prefix * 256 + digit, k - tl.sum(tl.where(digits > digit, counts, 0), axis=0)


@triton.jit
def kth_of(x, taken, k):
    """(the k-th highest of those of x that are taken, how many of its equals belong to the first k)."""
    prefix = tl.zeros([], tl.int64)
    for level in tl.static_range(4):
        prefix, k = _next_digit(_counts(x, taken, prefix, level), prefix, k)
    return _number(prefix), k


@triton.jit
def kth_of_line(line_ptr, vocab_size, temperature, k, BLOCK: tl.constexpr):
    """The same of a row of logits divided by the temperature, which is read once for each digit."""
    prefix = tl.zeros([], tl.int64)
    for level in tl.static_range(4):
        counts = tl.zeros([_DIGITS], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = load_scaled(line_ptr, tokens, vocab_size, temperature)
            counts += _counts(x, tokens < vocab_size, prefix, level)
        prefix, k = _next_digit(counts, prefix, k)
    return _number(prefix), k


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
