"""The draw of tokens within top_k, top_p and min_p, without sorting a vocabulary and without the host.

A first pass over all logits finds each row's likeliest token and its highest score, which is logit plus noise. If the
token with the highest score lies within the limits, it is the draw, since nothing within them can have a higher one.
Else all that comes after it in the order (higher logit first, then lower id) is out too, and what comes before it is
drawn from again. Noise follows quire/ops/gumbel.py to the bit: no multiplication is fused with an addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_CHUNK = 4096  # tokens of a program of the first pass
_BLOCK = 8192  # tokens at a time where one program walks over a row
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
_DIGITS = tl.constexpr(256)
_ONE = tl.constexpr(float(1 << 40))


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
def _load_scaled(line_ptr, tokens, vocab_size, temperature):
    x = tl.load(line_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, temperature)
    return tl.where(x == 0.0, 0.0, x)  # no negative zero: it would be another key


@triton.jit
def _best_score(
    line_ptr, first, vocab_size, temperature, seed, position, floor, bound, bound_token, COUNTERS: tl.constexpr
):
    """(score, token) of the best of 4 * COUNTERS tokens from `first` on, not under `floor`, and before the bound."""
    counters = first // 4 + tl.arange(0, COUNTERS)
    zeros = counters * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    words = tl.philox(
        seed, counters.to(tl.uint32), zeros.to(tl.uint32) + low, zeros.to(tl.uint32) + high,
        zeros.to(tl.uint32) + _DOMAIN,
    )  # fmt: skip
    best = tl.full([COUNTERS], float("-inf"), tl.float32)
    at = zeros + vocab_size
    for word in tl.static_range(4):
        tokens = counters * 4 + word
        x = _load_scaled(line_ptr, tokens, vocab_size, temperature)
        before = (x > bound) | ((x == bound) & (tokens < bound_token))
        allowed = (tokens < vocab_size) & (x >= floor) & before
        score = tl.where(allowed, _gumbel(words[word]) + x, float("-inf"))
        is_better = score > best
        best = tl.where(is_better, score, best)
        at = tl.where(is_better, tokens, at)
    highest = tl.max(best, axis=0)
    return highest, tl.min(tl.where(best == highest, at, vocab_size), axis=0)


@triton.jit
def _scan_kernel(
    logits_ptr,
    parameters_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,  # [rows, chunks] float32: the highest logit, infinite for NaN
    best_at_ptr,  # [rows, chunks] int32
    score_ptr,
    score_at_ptr,
    vocab_size,
    logits_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(line_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, axis=0)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(best_at_ptr + row * num_chunks + chunk, tl.min(tl.where(x == best, tokens, vocab_size), axis=0))
    temperature = tl.load(parameters_ptr + row).to(tl.float32)
    if temperature > 0.0:
        nothing = float("-inf")
        score, token = _best_score(
            line_ptr, chunk * CHUNK, vocab_size, temperature, tl.load(seeds_ptr + row), tl.load(positions_ptr + row),
            nothing, nothing, vocab_size, CHUNK // 4,
        )  # fmt: skip
        tl.store(score_ptr + row * num_chunks + chunk, score)
        tl.store(score_at_ptr + row * num_chunks + chunk, token)


@triton.jit
def _keys(x):
    """float32 as int64 in [0, 2^32), in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.int64) + 2147483648


@triton.jit
def _kth_highest(line_ptr, vocab_size, temperature, lowest, count, BLOCK: tl.constexpr):
    """(the count-th highest value that is not under `lowest`, how many of its equals belong to the first `count`)."""
    digits = tl.arange(0, _DIGITS)
    prefix = tl.zeros([], tl.int64)
    for level in tl.static_range(4):
        mass = tl.zeros([_DIGITS], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = _load_scaled(line_ptr, tokens, vocab_size, temperature)
            keys = _keys(x)
            taken = (tokens < vocab_size) & (x >= lowest) & ((keys >> (32 - 8 * level)) == prefix)
            mass += tl.histogram(((keys >> (24 - 8 * level)) & 255).to(tl.int32), _DIGITS, mask=taken)
        if level == 0:
            count = tl.minimum(count, tl.sum(mass, axis=0))
        at_least = tl.cumsum(mass, axis=0, reverse=True)
        digit = tl.max(tl.where(at_least >= count, digits, 0), axis=0)
        count -= tl.sum(tl.where(digits > digit, mass, 0), axis=0)
        prefix = prefix * 256 + digit
    flipped = (prefix - 2147483648).to(tl.int32)
    bits = flipped ^ ((flipped >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), count


@triton.jit
def _weights(x, top):
    return (tl.exp(x - top) * _ONE).to(tl.int64)


@triton.jit
def _within(
    line_ptr, vocab_size, temperature, log_min_p, top_k, top_p, seed, position, token, top, BLOCK: tl.constexpr
):
    """The draw within the limits, given the token with the highest score of all and the highest scaled logit."""
    lowest = top + log_min_p
    least = float("-inf") + top * 0.0
    kept_equals = vocab_size + top_k * 0
    if top_k > 0:
        least, kept_equals = _kth_highest(line_ptr, vocab_size, temperature, lowest, top_k, BLOCK)
    floor = tl.maximum(lowest, least)
    is_found = tl.zeros([], tl.int1)
    while not is_found:
        bound = _load_scaled(line_ptr, token, vocab_size, temperature)
        count = tl.zeros([], tl.int32)  # of what comes before the token
        mass = tl.zeros([], tl.int64)
        total = tl.zeros([], tl.int64)  # of what top_k and min_p leave
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = _load_scaled(line_ptr, tokens, vocab_size, temperature)
            before = (x >= lowest) & ((x > bound) | ((x == bound) & (tokens < token)))
            count += tl.sum(before.to(tl.int32), axis=0)
            if top_p < 1.0:
                weights = _weights(x, top)
                mass += tl.sum(tl.where(before, weights, 0), axis=0)
                total += tl.sum(tl.where((x >= floor) & ((x > least) | (top_k == 0)), weights, 0), axis=0)
        if (top_p < 1.0) & (top_k > 0):
            total += _weights(least, top) * kept_equals
        needed = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
        is_found = (bound >= floor) & ((count < top_k) | (top_k == 0)) & ((mass < needed) | (top_p >= 1.0))
        if not is_found:
            best = float("-inf") + top * 0.0
            better_token = token * 0 + vocab_size
            for start in range(0, vocab_size, BLOCK):
                score, at = _best_score(
                    line_ptr, start, vocab_size, temperature, seed, position, floor, bound, token, BLOCK // 4
                )
                better_token = tl.where(score > best, at, better_token)
                best = tl.maximum(best, score)
            token = better_token
    return token


@triton.jit
def _choose_kernel(
    logits_ptr,
    parameters_ptr,  # [4, rows] float64: temperature (0: the likeliest), log of min_p, top_k (0: none), top_p
    seeds_ptr,
    positions_ptr,
    best_ptr,
    best_at_ptr,
    score_ptr,
    score_at_ptr,
    tokens_ptr,
    highest_ptr,
    vocab_size,
    logits_stride,
    num_chunks,
    count,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = row * num_chunks + chunks
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    highest = tl.max(best, axis=0)
    places = tl.load(best_at_ptr + at, mask=inside, other=vocab_size)
    token = tl.min(tl.where(inside & (best == highest), places, vocab_size), axis=0)
    temperature = tl.load(parameters_ptr + row).to(tl.float32)
    is_sound = (highest < float("inf")) & (highest > float("-inf"))
    if is_sound & (temperature > 0.0):
        scores = tl.load(score_ptr + at, mask=inside, other=float("-inf"))
        places = tl.load(score_at_ptr + at, mask=inside, other=vocab_size)
        score = tl.max(scores, axis=0)
        token = tl.min(tl.where(inside & (scores == score), places, vocab_size), axis=0)
        log_min_p = tl.load(parameters_ptr + count + row).to(tl.float32)
        top_k = tl.load(parameters_ptr + 2 * count + row).to(tl.int32)
        top_p = tl.load(parameters_ptr + 3 * count + row)
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")):
            top = tl.div_rn(highest, temperature)
            line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            token = _within(
                line_ptr, vocab_size, temperature, log_min_p, top_k, top_p, seed, position, token, top, BLOCK
            )
    tl.store(tokens_ptr + row, tl.minimum(token, vocab_size - 1))
    tl.store(highest_ptr + row, highest)


def draw_within(logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See quire/ops/draw_within.py."""
    count, vocab_size = logits.shape
    device = logits.device
    chunks = triton.cdiv(vocab_size, _CHUNK)
    best, scores = torch.empty(2, count, chunks, dtype=torch.float32, device=device).unbind(0)
    best_at, scores_at = torch.empty(2, count, chunks, dtype=torch.int32, device=device).unbind(0)
    tokens = torch.empty(count, dtype=torch.int32, device=device)
    highest = torch.empty(count, dtype=torch.float32, device=device)
    inputs = (logits, parameters, seeds, positions, best, best_at, scores, scores_at)
    _scan_kernel[(count, chunks)](
        *inputs,
        vocab_size,
        logits.stride(0),
        chunks,
        CHUNK=_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
        **launch_options(),
    )
    _choose_kernel[(count,)](
        *inputs,
        tokens,
        highest,
        vocab_size,
        logits.stride(0),
        chunks,
        count,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(vocab_size))),
        num_warps=16,
        enable_fp_fusion=False,
        **launch_options(),
    )
    return tokens, highest
