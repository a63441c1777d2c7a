"""Logits of a row divided by the temperature, and the best of them with noise added.

Noise follows quire/ops/gumbel.py to the bit: kernels that use it are launched with `launch_options(fused=False)`, so
that no multiplication is fused with an addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Constants of the noise, as its specification gives them.
_DOMAIN = tl.constexpr(0x47554D42)
_LN2 = tl.constexpr(0.693147182464599609375)
_MIN_UNIFORM = tl.constexpr(2.0**-25)
_SQRT_HALF = tl.constexpr(0x3F3504F3)
_C0 = tl.constexpr(-0.4999998211860657)
_C1 = tl.constexpr(0.3333393335342407)
_C2 = tl.constexpr(-0.25002583861351013)
_C3 = tl.constexpr(0.19963476061820984)
_C4 = tl.constexpr(-0.16551794111728668)
_C5 = tl.constexpr(0.14883700013160706)
_C6 = tl.constexpr(-0.14426842331886292)
_C7 = tl.constexpr(0.0897943452000618)


@triton.jit
def _log(exponent, f):
    q = f * _C7 + _C6
    q = q * f + _C5
    q = q * f + _C4
    q = q * f + _C3
    q = q * f + _C2
    q = q * f + _C1
    q = q * f + _C0
    return q * f * f + f + exponent.to(tl.float32) * _LN2


@triton.jit
def _split(x):
    shifted = x.to(tl.int32, bitcast=True) - _SQRT_HALF
    return shifted >> 23, ((shifted & 0x7FFFFF) + _SQRT_HALF).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _gumbel(word):
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, f = _split(tl.maximum(1.0 - v, _MIN_UNIFORM))
    exponential = -_log(exponent, tl.where(exponent < 0, f, -v))
    exponent, f = _split(exponential)
    return -_log(exponent, f)


@triton.jit
def _words(counters, seed, position):
    """The four random words of each counter."""
    zeros = (counters * 0).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, counters.to(tl.uint32), zeros + low, zeros + high, zeros + _DOMAIN)


@triton.jit
def noise_of(tokens, seed, position):
    """The noise of these token ids."""
    words = _words(tokens // 4, seed, position)
    place = tokens % 4
    word = tl.where(place == 0, words[0], tl.where(place == 1, words[1], tl.where(place == 2, words[2], words[3])))
    return _gumbel(word)


@triton.jit
def load_scaled(line_ptr, tokens, vocab_size, temperature):
    x = tl.load(line_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, temperature)
    return tl.where(x == 0.0, 0.0, x)  # no negative zero: it would be another key


@triton.jit
def best_score(
    line_ptr, first, vocab_size, temperature, seed, position, floor, bound, bound_token, COUNTERS: tl.constexpr,
    FIRST_ID: tl.constexpr = 0,
):  # fmt: skip
    """(score, token) of the best of 4 * COUNTERS tokens from `first` on, not under `floor`, and before the bound.

    Tokens are places in the line, whose first one has FIRST_ID. Where that is no multiple of 4, the tokens are those
    from up to three places before `first` on.
    """
    counters = (FIRST_ID + first) // 4 + tl.arange(0, COUNTERS)
    words = _words(counters, seed, position)
    best = tl.full([COUNTERS], float("-inf"), tl.float32)
    at = counters * 0 + vocab_size
    for word in tl.static_range(4):
        tokens = counters * 4 + word - FIRST_ID
        x = load_scaled(line_ptr, tl.maximum(tokens, 0), vocab_size, temperature)
        before = (x > bound) | ((x == bound) & (tokens < bound_token))
        allowed = (tokens >= 0) & (tokens < vocab_size) & (x >= floor) & before
        score = tl.where(allowed, _gumbel(words[word]) + x, float("-inf"))
        is_better = score > best
        best = tl.where(is_better, score, best)
        at = tl.where(is_better, tokens, at)
    highest = tl.max(best, axis=0)
    return highest, tl.min(tl.where(best == highest, at, vocab_size), axis=0)
