"""The k-th highest number of a row by bisection: no sort, and the same whatever the order of its numbers.

Numbers of float32 are ordered as integers of 32 bits. Between two of them is the one that just k numbers reach; if
there is none, because of equal ones, the two are neighbours in the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.noise import load_scaled

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # stands for minus infinity, below which there are no numbers


@triton.jit
def _key(x):
    """The place of a number among all, in [0, 2^32)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _number(key):
    flipped = (key - 2147483648).to(tl.int32)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _or_infinite(x):
    return tl.where(x <= _LOWEST, float("-inf"), x)


@triton.jit
def _narrow(below, above, middle, reached, k):
    """Keys that are reached by at least k and by less than k numbers, given how many reach the middle of them."""
    is_enough = reached >= k
    below = tl.where(is_enough, middle, below)
    above = tl.where(is_enough, above, middle)
    return below, tl.where(reached == k, below + 1, above)


@triton.jit
def kth_of(x, taken, k, low, high):
    """(the k-th highest of those of x that are taken, how many of its equals belong to the first k).

    None of them is above `high`, and at least k are not below `low`.
    """
    x = tl.where(taken, tl.maximum(x, _LOWEST), float("-inf"))
    below, above = _key(tl.maximum(low, _LOWEST)), _key(high) + 1
    while above - below > 1:
        middle = (below + above) // 2
        reached = tl.sum((x >= _number(middle)).to(tl.int32), axis=0)
        below, above = _narrow(below, above, middle, reached, k)
    value = tl.min(tl.where(x >= _number(below), x, float("inf")), axis=0)
    return _or_infinite(value), k - tl.sum((x > value).to(tl.int32), axis=0)


@triton.jit
def _look(line_ptr, vocab_size, temperature, bound, BLOCK: tl.constexpr):
    """Of a row's logits over the temperature: how many reach a bound, the lowest of them, how many exceed it."""
    reached = tl.zeros([], tl.int32)
    lowest = tl.full([], float("inf"), tl.float32)
    higher = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.maximum(load_scaled(line_ptr, tokens, vocab_size, temperature), _LOWEST)
        x = tl.where(tokens < vocab_size, x, float("-inf"))
        reached += tl.sum((x >= bound).to(tl.int32), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(x >= bound, x, float("inf")), axis=0))
        higher += tl.sum((x > bound).to(tl.int32), axis=0)
    return reached, lowest, higher


@triton.jit
def kth_of_line(line_ptr, vocab_size, temperature, k, high, BLOCK: tl.constexpr):
    """The same of a row of logits divided by the temperature, which is read over and over."""
    below, above = _key(high * 0.0 + _LOWEST), _key(high) + 1
    while above - below > 1:
        middle = (below + above) // 2
        reached, _, _ = _look(line_ptr, vocab_size, temperature, _number(middle), BLOCK)
        below, above = _narrow(below, above, middle, reached, k)
    _, value, _ = _look(line_ptr, vocab_size, temperature, _number(below), BLOCK)
    _, _, higher = _look(line_ptr, vocab_size, temperature, value, BLOCK)
    return _or_infinite(value), k - higher


@triton.jit
def kth_by_groups(
    line_ptr,
    group_highest_ptr,  # [groups] float32: the highest logit of each group of tokens
    found_ptr,  # [MOST] int32: room for groups
    vocab_size,
    temperature,
    num_groups,
    k,
    high,
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
    bound, _ = kth_of(highest, inside, k, high * 0.0 + _LOWEST, high)
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
    value, equals = kth_of(x, taken, k, bound, high)
    is_bound = count < k
    return tl.where(is_bound, bound, value), tl.where(is_bound, k - count, equals)
