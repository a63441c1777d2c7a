"""The draw of tokens within top_k, top_p and min_p, without sorting a vocabulary and without the host.

The token with the highest score, which is logit plus noise, is the draw if it lies within the limits: nothing within
them can have a higher score. What top_k and min_p leave is known before scores are made: logits not under a floor.
What top_p leaves is not. So the token is measured: which part of the probability comes before it in the order (higher
logit first, then lower id)? If that is too much, all that comes after it is out as well, and what comes before it is
sampled from again. Three rounds of that run on all programs, chunks of rows each; the few rows that need more are
left to one program each. Probabilities are added as integers, so that their order makes no difference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.kth import kth_by_groups, kth_of_line
from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.kernels.triton.noise import best_score, load_scaled

_CHUNK = 4096  # tokens of a program
GROUP = 128  # tokens that share a highest logit
_BLOCK = 8192  # tokens at a time where one program walks over a row
FEW = 128  # the largest top_k that groups are used for
_SPREAD = 16  # programs that share a row's chunks in a round: more than that, and those of finished rows take long
_ROUNDS = 3
_ONE = tl.constexpr(float(1 << 40))  # the greedy token's probability as an integer


@triton.jit(do_not_specialize=["count"])
def _scan_kernel(
    logits_ptr,
    parameters_ptr,
    seeds_ptr,
    positions_ptr,
    group_highest_ptr,  # [rows, groups] float32
    best_ptr,  # [rows, chunks] float32: the highest logit, infinite for NaN
    best_at_ptr,  # [rows, chunks] int32
    score_ptr,  # [rows, chunks] float32
    score_at_ptr,  # [rows, chunks] int32
    vocab_size,
    logits_stride,
    num_groups,
    num_chunks,
    count,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    FIRST_ID: tl.constexpr = 0,  # of the first logit's token
):
    """The greedy token of each chunk; and the one with the highest score, where no floor must be known before."""
    begin_dependent(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(line_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    group_highest = tl.max(x, axis=1)
    tl.store(group_highest_ptr + row * num_groups + groups, group_highest, mask=groups < num_groups)
    best = tl.max(group_highest, axis=0)
    at = row * num_chunks + chunk
    tl.store(best_ptr + at, best)
    tl.store(best_at_ptr + at, tl.min(tl.min(tl.where(x == best, tokens, vocab_size), axis=1), axis=0))
    temperature, log_min_p, top_k, _ = load_parameters(parameters_ptr, row, count)
    if (temperature > 0.0) & (top_k == 0) & (log_min_p == float("-inf")):
        nothing = float("-inf")
        score, token = best_score(
            line_ptr, chunk * CHUNK, vocab_size, temperature, tl.load(seeds_ptr + row), tl.load(positions_ptr + row),
            nothing, nothing, vocab_size, CHUNK // 4, FIRST_ID,
        )  # fmt: skip
        tl.store(score_ptr + at, score)
        tl.store(score_at_ptr + at, token)


@triton.jit
def load_parameters(parameters_ptr, row, count):
    temperature = tl.load(parameters_ptr + row).to(tl.float32)
    log_min_p = tl.load(parameters_ptr + count + row).to(tl.float32)
    return (
        temperature,
        log_min_p,
        tl.load(parameters_ptr + 2 * count + row).to(tl.int32),
        tl.load(parameters_ptr + 3 * count + row),
    )


@triton.jit
def first_of(values_ptr, places_ptr, row, num_chunks, vocab_size, CHUNKS: tl.constexpr):
    """(the highest value of a row's chunks, the lowest place of it)"""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    values = tl.load(values_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    places = tl.load(places_ptr + row * num_chunks + chunks, mask=inside, other=vocab_size)
    highest = tl.max(values, axis=0)
    return highest, tl.min(tl.where(inside & (values == highest), places, vocab_size), axis=0)


@triton.jit(do_not_specialize=["sampled_ptr", "count"])
def _limits_kernel(
    logits_ptr,
    parameters_ptr,
    group_highest_ptr,
    found_ptr,  # [rows, FEW] int32
    best_ptr,
    best_at_ptr,
    score_ptr,
    score_at_ptr,
    sampled_ptr,  # [rows] int32: the draw, or -1
    highest_ptr,  # [rows] float32
    limits_ptr,  # [4, rows] float32: highest of what is sampled from, the floor, what top_k ends at, how many of it
    vocab_size,
    logits_stride,
    num_groups,
    num_chunks,
    count,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The floor of each row that has limits; and the tokens of those that have none."""
    begin_dependent(PDL)
    row = tl.program_id(0)
    highest, token = first_of(best_ptr, best_at_ptr, row, num_chunks, vocab_size, CHUNKS)
    tl.store(highest_ptr + row, highest)
    temperature, log_min_p, top_k, top_p = load_parameters(parameters_ptr, row, count)
    is_sound = (highest < float("inf")) & (highest > float("-inf"))
    if is_sound & (temperature > 0.0):
        top = tl.div_rn(highest, temperature)
        floor = top + log_min_p
        least = float("-inf") + top * 0.0
        equals = top_k * 0
        if top_k > 0:
            line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
            k = tl.minimum(top_k, vocab_size)
            if (k <= FEW) & (k <= num_groups):
                least, equals = kth_by_groups(
                    line_ptr, group_highest_ptr + row * num_groups, found_ptr + row * FEW, vocab_size, temperature,
                    num_groups, k, top, GROUPS, GROUP, FEW,
                )  # fmt: skip
            else:
                least, equals = kth_of_line(line_ptr, vocab_size, temperature, k, top, BLOCK)
            # Where min_p leaves less than top_k does, top_k changes nothing.
            equals = tl.where(least < floor, 0, equals)
            least = tl.where(least < floor, float("-inf"), least)
            floor = tl.maximum(floor, least)
        tl.store(limits_ptr + row, top)
        tl.store(limits_ptr + count + row, floor)
        tl.store(limits_ptr + 2 * count + row, least)
        tl.store(limits_ptr + 3 * count + row, equals.to(tl.float32))
        _, token = first_of(score_ptr, score_at_ptr, row, num_chunks, vocab_size, CHUNKS)
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")):
            token = token * 0 - 1
    tl.store(sampled_ptr + row, tl.minimum(token, vocab_size - 1))


@triton.jit
def weights_of(x, top):
    return (tl.exp(x - top) * _ONE).to(tl.int64)


@triton.jit
def _measure(x, tokens, bound, token, top, floor, least):
    """Of some tokens: how many come before `token`, their probability, and that of what is above the end of top_k."""
    before = (x > bound) | ((x == bound) & (tokens < token))
    weights = weights_of(x, top)
    mass = tl.sum(tl.where(before, weights, 0), axis=0)
    total = tl.sum(tl.where((x >= floor) & (x > least), weights, 0), axis=0)
    return tl.sum(before.to(tl.int32), axis=0), mass, total


@triton.jit
def _is_within(before, mass, total, top, least, equals, top_k, top_p):
    """Whether a token is the draw, given what `_measure` finds in all of its row."""
    if equals > 0:
        total += weights_of(least, top) * equals
    needed = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
    return ((before < top_k) | (top_k == 0)) & ((mass < needed) | (top_p >= 1.0))


@triton.jit
def _load_limits(limits_ptr, row, count):
    equals = tl.load(limits_ptr + 3 * count + row).to(tl.int64)
    return tl.load(limits_ptr + row), tl.load(limits_ptr + count + row), tl.load(limits_ptr + 2 * count + row), equals


@triton.jit
def _is_measured(measures_ptr, limits_ptr, parameters_ptr, row, num_chunks, count, CHUNKS: tl.constexpr):
    """Whether the token that `_measure_kernel` measured for a row is its draw."""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = measures_ptr + row * num_chunks + chunks
    before = tl.sum(tl.load(at, mask=inside, other=0), axis=0)
    mass = tl.sum(tl.load(at + count * num_chunks, mask=inside, other=0), axis=0)
    total = tl.sum(tl.load(at + 2 * count * num_chunks, mask=inside, other=0), axis=0)
    top, _, least, equals = _load_limits(limits_ptr, row, count)
    _, _, top_k, top_p = load_parameters(parameters_ptr, row, count)
    return _is_within(before, mass, total, top, least, equals, top_k, top_p)


@triton.jit(do_not_specialize=["sampled_ptr", "now_sampled_ptr", "count"])
def _sample_kernel(
    logits_ptr,
    parameters_ptr,
    seeds_ptr,
    positions_ptr,
    limits_ptr,
    sampled_ptr,  # [rows] int32: the draw, or -1; like the next three, of the round before
    before_score_ptr,
    before_score_at_ptr,
    measures_ptr,
    # Of its own: what others of its programs read must not change under them, not even from one warp to the next.
    now_sampled_ptr,
    score_ptr,
    score_at_ptr,
    vocab_size,
    logits_stride,
    num_chunks,
    count,
    IS_FIRST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The highest score of each chunk, of what is not under the floor, and before what was found to be too much."""
    begin_dependent(PDL)
    row = tl.program_id(0)
    sampled = tl.load(sampled_ptr + row)
    if sampled >= 0:
        tl.store(now_sampled_ptr + row, sampled)
        return
    line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    temperature, log_min_p, top_k, _ = load_parameters(parameters_ptr, row, count)
    _, floor, _, _ = _load_limits(limits_ptr, row, count)
    if IS_FIRST:
        tl.store(now_sampled_ptr + row, sampled)
        if (top_k == 0) & (log_min_p == float("-inf")):  # it has its scores
            return
        bound = float("-inf")
        token = vocab_size
    else:
        _, token = first_of(before_score_ptr, before_score_at_ptr, row, num_chunks, vocab_size, CHUNKS)
        is_found = _is_measured(measures_ptr, limits_ptr, parameters_ptr, row, num_chunks, count, CHUNKS)
        tl.store(now_sampled_ptr + row, tl.where(is_found, token, sampled))
        if is_found:
            return
        bound = load_scaled(line_ptr, token, vocab_size, temperature)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        score, at = best_score(
            line_ptr, chunk * CHUNK, vocab_size, temperature, seed, position, floor, bound, token, CHUNK // 4
        )
        tl.store(score_ptr + row * num_chunks + chunk, score)
        tl.store(score_at_ptr + row * num_chunks + chunk, at)


@triton.jit(do_not_specialize=["sampled_ptr", "count"])
def _measure_kernel(
    logits_ptr,
    parameters_ptr,
    limits_ptr,
    sampled_ptr,
    score_ptr,
    score_at_ptr,
    measures_ptr,  # [3, rows, chunks] int64
    vocab_size,
    logits_stride,
    num_chunks,
    count,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """What comes before the token with the highest score, chunk by chunk."""
    begin_dependent(PDL)
    row = tl.program_id(0)
    if tl.load(sampled_ptr + row) >= 0:
        return
    line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    temperature = tl.load(parameters_ptr + row).to(tl.float32)
    top, floor, least, _ = _load_limits(limits_ptr, row, count)
    _, token = first_of(score_ptr, score_at_ptr, row, num_chunks, vocab_size, CHUNKS)
    bound = load_scaled(line_ptr, token, vocab_size, temperature)
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_scaled(line_ptr, tokens, vocab_size, temperature)
        before, mass, total = _measure(x, tokens, bound, token, top, floor, least)
        at = measures_ptr + row * num_chunks + chunk
        tl.store(at, before.to(tl.int64))
        tl.store(at + count * num_chunks, mass)
        tl.store(at + 2 * count * num_chunks, total)


@triton.jit(do_not_specialize=["sampled_ptr", "count"])
def _finish_kernel(
    logits_ptr,
    parameters_ptr,
    seeds_ptr,
    positions_ptr,
    limits_ptr,
    sampled_ptr,
    score_ptr,
    score_at_ptr,
    measures_ptr,
    tokens_ptr,
    vocab_size,
    logits_stride,
    num_chunks,
    count,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The draw of rows that have none yet: of the last round, or of as many rounds as it takes by one program."""
    begin_dependent(PDL)
    row = tl.program_id(0)
    sampled = tl.load(sampled_ptr + row)
    if sampled >= 0:
        tl.store(tokens_ptr + row, sampled)
        return
    line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    temperature, _, top_k, top_p = load_parameters(parameters_ptr, row, count)
    top, floor, least, equals = _load_limits(limits_ptr, row, count)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    _, token = first_of(score_ptr, score_at_ptr, row, num_chunks, vocab_size, CHUNKS)
    is_found = _is_measured(measures_ptr, limits_ptr, parameters_ptr, row, num_chunks, count, CHUNKS)
    while not is_found:
        bound = load_scaled(line_ptr, token, vocab_size, temperature)
        best = float("-inf") + top * 0.0
        better_token = token * 0 + vocab_size
        for start in range(0, vocab_size, BLOCK):
            score, at = best_score(
                line_ptr, start, vocab_size, temperature, seed, position, floor, bound, token, BLOCK // 4
            )
            better_token = tl.where(score > best, at, better_token)
            best = tl.maximum(best, score)
        token = better_token
        bound = load_scaled(line_ptr, token, vocab_size, temperature)
        before = tl.zeros([], tl.int32)
        mass = tl.zeros([], tl.int64)
        total = tl.zeros([], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = load_scaled(line_ptr, tokens, vocab_size, temperature)
            more = _measure(x, tokens, bound, token, top, floor, least)
            before += more[0]
            mass += more[1]
            total += more[2]
        is_found = _is_within(before.to(tl.int64), mass, total, top, least, equals, top_k, top_p)
        is_found = is_found | (token == vocab_size)  # cannot be; but a loop on a device must end
    tl.store(tokens_ptr + row, tl.minimum(token, vocab_size - 1))


class Scanned(NamedTuple):
    """What `_scan_kernel` finds of logits."""

    group_highest: Tensor
    best: Tensor
    best_at: Tensor
    score: Tensor
    score_at: Tensor


def scan(logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor, first_id: int = 0) -> Scanned:
    """Of logits [rows, size], the first of which is of the token `first_id`."""
    count, size = logits.shape
    # Noise is made for four tokens at a time, so that a chunk may begin up to three tokens early.
    groups, chunks = triton.cdiv(size, GROUP), triton.cdiv(size + first_id % 4, _CHUNK)

    def scratch(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, width, dtype=dtype, device=logits.device)

    found = Scanned(
        scratch(groups), scratch(chunks), scratch(chunks, torch.int32), scratch(chunks), scratch(chunks, torch.int32)
    )
    _scan_kernel[(count, chunks)](
        logits, parameters, seeds, positions, *found, size, logits.stride(0), groups, chunks, count,
        CHUNK=_CHUNK, GROUP=GROUP, FIRST_ID=first_id, num_warps=4, **launch_options(fused=False),
    )  # fmt: skip
    return found


def sample_within(logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See quire/ops/sample.py."""
    count, vocab_size = logits.shape
    groups, chunks = triton.cdiv(vocab_size, GROUP), triton.cdiv(vocab_size, _CHUNK)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens, highest = scratch(count, dtype=torch.int32), scratch(count)
    sampled = scratch(1 + _ROUNDS, count, dtype=torch.int32)
    limits, scanned = scratch(4, count), scan(logits, parameters, seeds, positions)
    scores = [(scratch(count, chunks), scratch(count, chunks, dtype=torch.int32)) for _ in range(1, _ROUNDS)]
    scores = [(scanned.score, scanned.score_at), *scores]
    measures = [scratch(3, count, chunks, dtype=torch.int64) for _ in range(_ROUNDS)]
    found = scratch(count, FEW, dtype=torch.int32)
    of_row, keys = (logits, parameters), (seeds, positions)
    sizes = (vocab_size, logits.stride(0), chunks, count)
    padded = triton.next_power_of_2(chunks)
    block = min(_BLOCK, max(16, triton.next_power_of_2(vocab_size)))
    shared = (count, min(chunks, _SPREAD))
    options = launch_options(fused=False)
    _limits_kernel[(count,)](
        *of_row, scanned.group_highest, found, *scanned[1:], sampled[0], highest, limits, vocab_size,
        logits.stride(0), groups, chunks, count, CHUNKS=padded, GROUPS=triton.next_power_of_2(groups), GROUP=GROUP,
        FEW=FEW, BLOCK=block, num_warps=16, **options,
    )  # fmt: skip
    for now in range(_ROUNDS):
        before = (sampled[now], *scores[max(now - 1, 0)], measures[max(now - 1, 0)])
        _sample_kernel[shared](
            *of_row, *keys, limits, *before, sampled[now + 1], *scores[now], *sizes,
            IS_FIRST=now == 0, CHUNKS=padded, CHUNK=_CHUNK, num_warps=4, **options,
        )  # fmt: skip
        _measure_kernel[shared](
            *of_row, limits, sampled[now + 1], *scores[now], measures[now], *sizes,
            CHUNKS=padded, CHUNK=_CHUNK, num_warps=4, **options,
        )  # fmt: skip
    _finish_kernel[(count,)](
        *of_row, *keys, limits, sampled[-1], *scores[-1], measures[-1], tokens, *sizes,
        CHUNKS=padded, BLOCK=block, num_warps=16, **options,
    )  # fmt: skip
    return tokens, highest
