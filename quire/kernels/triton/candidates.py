"""Sampling on logits that ranks share by vocabulary: what each offers, and the draw among the offers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.kth import kth_by_groups, kth_of, kth_of_line
from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.kernels.triton.noise import load_scaled, noise_of
from quire.kernels.triton.sampling import FEW, GROUP, Scanned, first_of, load_parameters, scan, weights_of
from quire.kernels.triton.step import find_highest

_BLOCK = 4096  # tokens at a time where a program walks over a row
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_SampledRows = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _put(out_ptr, places, tokens, logits, mask, FIRST_ID: tl.constexpr, COUNT: tl.constexpr):
    tl.store(out_ptr + 1 + places, logits.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out_ptr + 1 + COUNT + places, FIRST_ID + tokens, mask=mask)


@triton.jit
def _put_first(line_ptr, out_ptr, size, temperature, least, equals, FIRST_ID: tl.constexpr, COUNT: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Offer the tokens above `least`, and the first `equals` of those equal to it; returns how many were offered."""
    taken = tl.zeros([], tl.int32)
    met = tl.zeros([], tl.int32)
    for start in range(0, size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = load_scaled(line_ptr, tokens, size, temperature)
        is_equal = ((x == least) & (tokens < size)).to(tl.int32)
        before = met + tl.cumsum(is_equal, axis=0) - is_equal
        kept = ((x > least) | ((is_equal > 0) & (before < equals))).to(tl.int32)
        places = taken + tl.cumsum(kept, axis=0) - kept
        logits = tl.load(line_ptr + tokens, mask=tokens < size, other=float("-inf")).to(tl.float32)
        _put(out_ptr, places, tokens, logits, (kept > 0) & (places < COUNT), FIRST_ID, COUNT)
        taken += tl.sum(kept, axis=0)
        met += tl.sum(is_equal, axis=0)
    return taken


@triton.jit(do_not_specialize=["rows"])
def _offer_kernel(
    logits_ptr,
    parameters_ptr,
    group_highest_ptr,  # [rows, groups] float32, or what is not read
    found_ptr,  # [rows, FEW] int32, or what is not read
    best_ptr,
    best_at_ptr,
    score_ptr,
    score_at_ptr,
    out_ptr,  # [rows, 1 + 2 * COUNT] int32
    size,
    logits_stride,
    num_groups,
    num_chunks,
    rows,
    SAMPLES: tl.constexpr,  # else all rows are greedy
    FIRST_ID: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0)
    line_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    out_ptr += row * (1 + 2 * COUNT)
    highest, token = first_of(best_ptr, best_at_ptr, row, num_chunks, size, CHUNKS)
    tl.store(out_ptr, highest.to(tl.int32, bitcast=True))
    taken = tl.zeros([], tl.int32)
    if SAMPLES:
        temperature, _min_p, top_k, _top_p = load_parameters(parameters_ptr, row, rows)
        is_sound = (highest < float("inf")) & (highest > float("-inf"))
        if is_sound & (temperature > 0.0):
            if top_k > 0:
                top = tl.div_rn(highest, temperature)
                k = tl.minimum(tl.minimum(top_k, COUNT), size)
                if k <= num_groups:
                    least, equals = kth_by_groups(
                        line_ptr, group_highest_ptr + row * num_groups, found_ptr + row * FEW, size, temperature,
                        num_groups, k, top, GROUPS, GROUP, FEW,
                    )  # fmt: skip
                else:
                    least, equals = kth_of_line(line_ptr, size, temperature, k, top, BLOCK)
                taken = _put_first(line_ptr, out_ptr, size, temperature, least, equals, FIRST_ID, COUNT, BLOCK)
            else:
                _best, token = first_of(score_ptr, score_at_ptr, row, num_chunks, size, CHUNKS)
    places = tl.arange(0, COUNT)
    token = tl.minimum(token, size - 1)
    is_one = (places == 0) & (taken == 0)
    one = tl.load(line_ptr + token).to(tl.float32)
    tokens = tl.where(is_one, token, 0)
    _put(out_ptr, places, tokens, tl.where(is_one, one, float("-inf")), places >= taken, FIRST_ID, COUNT)


def offer_candidates(logits: Tensor, first_token: int, count: int, sampled: _SampledRows | None = None) -> Tensor:
    """See quire/ops/candidates.py. `count` is a power of 2, at most 128."""
    rows, size = logits.shape
    if sampled is None:
        best, best_at = find_highest(logits)
        scanned = Scanned(best, best, best_at, best, best_at)
    else:
        scanned = scan(logits, *sampled, first_token)
    found = torch.empty(rows, FEW, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, 1 + 2 * count, dtype=torch.int32, device=logits.device)
    groups, chunks = triton.cdiv(size, GROUP), scanned.best.shape[1]
    _offer_kernel[(rows,)](
        logits, scanned.best if sampled is None else sampled[0], scanned.group_highest, found, *scanned[1:], out,
        size, logits.stride(0), groups, chunks, rows, SAMPLES=sampled is not None, FIRST_ID=first_token, COUNT=count,
        CHUNKS=triton.next_power_of_2(chunks), GROUPS=triton.next_power_of_2(groups), GROUP=GROUP, FEW=FEW,
        BLOCK=_BLOCK, num_warps=8, **launch_options(fused=False),
    )  # fmt: skip
    return out.view(torch.float32)


@triton.jit(do_not_specialize=["rows"])
def _among_kernel(
    offers_ptr,  # [rows, RANKS, 1 + 2 * COUNT] int32
    parameters_ptr,
    seeds_ptr,
    positions_ptr,
    tokens_ptr,
    highest_ptr,
    rows,
    SAMPLES: tl.constexpr,
    RANKS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,  # at least RANKS * COUNT
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0)
    offers_ptr += row * RANKS * (1 + 2 * COUNT)
    ranks = tl.arange(0, PADDED_RANKS)
    of_ranks = tl.load(offers_ptr + ranks * (1 + 2 * COUNT), mask=ranks < RANKS, other=-8388608)  # the bits of -inf
    highest = tl.max(of_ranks.to(tl.float32, bitcast=True), axis=0)
    places = tl.arange(0, SIZE)
    inside = places < RANKS * COUNT
    at = offers_ptr + places // COUNT * (1 + 2 * COUNT) + 1 + places % COUNT
    logits = tl.load(at, mask=inside, other=-8388608).to(tl.float32, bitcast=True)
    ids = tl.load(at + COUNT, mask=inside, other=0)
    best = tl.max(logits, axis=0)
    place = tl.min(tl.where(logits == best, places, SIZE - 1), axis=0)
    if SAMPLES:
        temperature, log_min_p, top_k, top_p = load_parameters(parameters_ptr, row, rows)
        is_sound = (highest < float("inf")) & (highest > float("-inf"))
        if is_sound & (temperature > 0.0):
            x = tl.div_rn(logits, temperature)
            x = tl.where(x == 0.0, 0.0, x)
            top = tl.max(x, axis=0)
            allowed = inside & (x >= top + log_min_p)
            if top_k > 0:
                least, equals = kth_of(x, inside, tl.minimum(top_k, RANKS * COUNT), top * 0.0 + _LOWEST, top)
                is_equal = (inside & (x == least)).to(tl.int32)
                allowed = allowed & ((x > least) | ((is_equal > 0) & (tl.cumsum(is_equal, axis=0) <= equals)))
            weights = tl.where(allowed, weights_of(x, top), 0)
            total = tl.sum(weights, axis=0)
            needed = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
            scores = noise_of(ids, tl.load(seeds_ptr + row), tl.load(positions_ptr + row)) + x
            scores = tl.where(allowed, scores, float("-inf"))
            is_found = top_p < 0.0
            while not is_found:
                score = tl.max(scores, axis=0)
                place = tl.min(tl.where(scores == score, places, SIZE - 1), axis=0)
                bound = tl.max(tl.where(places == place, x, float("-inf")), axis=0)
                before = (x > bound) | ((x == bound) & (places < place))
                mass = tl.sum(tl.where(before, weights, 0), axis=0)
                scores = tl.where(before, scores, float("-inf"))
                is_found = (mass < needed) | (top_p >= 1.0)
    tl.store(tokens_ptr + row, tl.sum(tl.where(places == place, ids, 0), axis=0))
    tl.store(highest_ptr + row, highest)


def sample_among(offers: Tensor, ranks: int, sampled: _SampledRows | None = None) -> tuple[Tensor, Tensor]:
    """See quire/ops/candidates.py."""
    rows, count = offers.shape[0], offers.shape[1] // ranks // 2
    tokens = torch.empty(rows, dtype=torch.int32, device=offers.device)
    highest = torch.empty(rows, dtype=torch.float32, device=offers.device)
    of_rows = (offers, offers, offers) if sampled is None else sampled
    _among_kernel[(rows,)](
        offers.contiguous().view(torch.int32), *of_rows, tokens, highest, rows,
        SAMPLES=sampled is not None, RANKS=ranks,
        PADDED_RANKS=triton.next_power_of_2(ranks), COUNT=count, SIZE=triton.next_power_of_2(ranks * count),
        num_warps=4, **launch_options(fused=False),
    )  # fmt: skip
    return tokens, highest
