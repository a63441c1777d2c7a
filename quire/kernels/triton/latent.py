"""Latent attention around its attention proper: queries that are absorbed, latents that are kept, values of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    allow_dependents,
    launch_options,
    padded_dim,
    prefetch_tile,
    wait_for_predecessor,
)
from quire.kernels.triton.widen import widened

_OUTPUTS = 128  # of a program
_SOME_TOKENS = 256  # that leave multiprocessors without work
_FEW_TOKENS = 4  # whose segments of attention are added up by those who read them


class Segments(NamedTuple):
    """What attention gives of single queries whose keys are shared by several programs, before it is added up."""

    parts: Tensor  # [listed, heads, splits, rank] float32
    numbers: Tensor  # [2, listed, heads, splits] float32: highest scores, sums of weights
    keys: int  # segments are whole multiples of this number of keys
    dtype: torch.dtype  # of the sum


@triton.jit
def segment_shares(numbers_ptr, number_offset, seen, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """By what each of a query's segments counts in the sum, and which there are; it sees `seen` keys."""
    segments = tl.arange(0, SPLITS)
    there = segments < tl.cdiv(seen, tl.cdiv(tl.cdiv(seen, KEYS), SPLITS) * KEYS)
    highest = tl.load(numbers_ptr + segments, mask=there, other=float("-inf"))
    weights = tl.exp2(highest - tl.max(highest))
    totals = tl.load(numbers_ptr + number_offset + segments, mask=there, other=0.0)
    return weights / tl.sum(totals * weights), there


@triton.jit
def _rotate(
    x_ptr, x_stride, out_ptr, out_stride, cos_ptr, sin_ptr, tokens, inside, HALF: tl.constexpr, PAIRS: tl.constexpr
):
    """Features i and i + HALF of each token's line, rotated; cos and sin [tokens, 2 * HALF], the sign folded in.

    cos None: as they are.
    """
    pairs = tl.arange(0, PAIRS)
    mask = inside[:, None] & (pairs < HALF)[None, :]
    at, turn = x_ptr + tokens[:, None] * x_stride + pairs[None, :], tokens[:, None] * (2 * HALF) + pairs[None, :]
    low, high = tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)
    low, high = low.to(tl.float32), high.to(tl.float32)
    if cos_ptr is not None:
        cos_low = tl.load(cos_ptr + turn, mask=mask, other=0.0).to(tl.float32)
        cos_high = tl.load(cos_ptr + turn + HALF, mask=mask, other=0.0).to(tl.float32)
        sin_low = tl.load(sin_ptr + turn, mask=mask, other=0.0).to(tl.float32)
        sin_high = tl.load(sin_ptr + turn + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = low * cos_low + high * sin_low, high * cos_high + low * sin_high
    return low, high, mask, pairs


@triton.jit
def kept_as(cache_ptr, x):
    """In the type of the cache; what an 8-bit one cannot hold becomes the largest that it can, and NaN is kept."""
    if cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    q_ptr,  # [tokens, heads, NOPE + ROPE], q_stride apart
    latent_ptr,  # [tokens, RANK + ROPE], latent_stride apart
    norm_ptr,
    up_ptr,  # [heads, NOPE, RANK]
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_ptr,  # [tokens, heads, RANK + ROPE]
    cache_ptr,
    kept_ptr,  # [tokens, RANK + ROPE], or None: what is kept in the type of activations
    num_tokens,
    q_stride,
    latent_stride,
    line_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,  # NOPE, padded
    OUTPUTS: tl.constexpr,  # of a program
    KEPT: tl.constexpr,  # tokens of a program that keeps their latents
    DIM: tl.constexpr,  # RANK, padded
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    head, part = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    HALF: tl.constexpr = ROPE // 2
    WIDTH: tl.constexpr = RANK + ROPE
    if PDL:  # noqa: SIM102  known when it is compiled
        if (head < NUM_HEADS) & ((part + 1) * OUTPUTS <= RANK):
            prefetch_tile(up_ptr + head.to(tl.int64) * NOPE * RANK + part * OUTPUTS, RANK, NOPE, OUTPUTS)
    wait_for_predecessor(PDL)
    if head == NUM_HEADS:  # what is kept of the tokens
        if part * KEPT < TOKENS:
            tokens = first + part * KEPT + tl.arange(0, KEPT)
            inside = tokens < num_tokens
            dims = tl.arange(0, DIM)
            in_rank = dims < RANK
            mask = inside[:, None] & in_rank[None, :]
            x = tl.load(latent_ptr + tokens[:, None] * latent_stride + dims[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            norm = tl.load(norm_ptr + dims, mask=in_rank, other=0.0).to(tl.float32)
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / RANK + eps))[:, None] * norm[None, :]
            x = x.to(query_ptr.dtype.element_ty)
            low, high, turned, pairs = _rotate(
                latent_ptr + RANK, latent_stride, query_ptr, 0, cos_ptr, sin_ptr, tokens, inside, HALF, PAIRS
            )
            low, high = low.to(query_ptr.dtype.element_ty), high.to(query_ptr.dtype.element_ty)
            if kept_ptr is not None:
                kept = kept_ptr + tokens[:, None] * WIDTH
                tl.store(kept + dims[None, :], x, mask=mask)
                tl.store(kept + RANK + pairs[None, :], low, mask=turned)
                tl.store(kept + RANK + HALF + pairs[None, :], high, mask=turned)
            slots = tl.load(slots_ptr + tokens, mask=inside, other=0)
            written = slots >= BLOCK_SIZE  # padding has slots of the null block, which stays zero
            line = cache_ptr + slots[:, None] * line_stride
            tl.store(line + dims[None, :], kept_as(cache_ptr, x), mask=mask & written[:, None])
            tl.store(line + RANK + pairs[None, :], kept_as(cache_ptr, low), mask=turned & written[:, None])
            tl.store(line + RANK + HALF + pairs[None, :], kept_as(cache_ptr, high), mask=turned & written[:, None])
    else:
        tokens = first + tl.arange(0, TOKENS)
        inside = tokens < num_tokens
        q = q_ptr + head * (NOPE + ROPE)
        out = query_ptr + head * WIDTH
        inner, outputs = tl.arange(0, INNER), part * OUTPUTS + tl.arange(0, OUTPUTS)
        in_nope, in_rank = inner < NOPE, outputs < RANK
        x = tl.load(
            q + tokens[:, None] * q_stride + inner[None, :], mask=inside[:, None] & in_nope[None, :], other=0.0
        )
        up = up_ptr + head.to(tl.int64) * NOPE * RANK
        weight = tl.load(
            up + inner[:, None] * RANK + outputs[None, :], mask=in_nope[:, None] & in_rank[None, :], other=0.0
        )
        absorbed = tl.dot(x, widened(weight, x.dtype), input_precision="ieee").to(query_ptr.dtype.element_ty)
        at = out + tokens[:, None] * (NUM_HEADS * WIDTH)
        tl.store(at + outputs[None, :], absorbed, mask=inside[:, None] & in_rank[None, :])
        if part == 0:
            low, high, turned, pairs = _rotate(
                q + NOPE, q_stride, query_ptr, 0, cos_ptr, sin_ptr, tokens, inside, HALF, PAIRS
            )
            tl.store(at + RANK + pairs[None, :], low.to(query_ptr.dtype.element_ty), mask=turned)
            tl.store(at + RANK + HALF + pairs[None, :], high.to(query_ptr.dtype.element_ty), mask=turned)


@triton.jit(do_not_specialize=["num_tokens"])
def _per_head_kernel(
    x_ptr,  # [tokens, heads, K], x_stride apart
    weight_ptr,  # [heads, K, N]
    out_ptr,  # [tokens, heads, N]
    num_tokens,
    x_stride,
    x_head,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    head = tl.program_id(1).to(tl.int64)
    if PDL:
        _prefetch_head(weight_ptr + head * (K * N), tl.program_id(2) * OUTPUTS, K, N, OUTPUTS)
    wait_for_predecessor(PDL)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    outputs, inside = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS), tokens < num_tokens
    acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(
            x_ptr + head * x_head + tokens[:, None] * x_stride + k[None, :],
            mask=inside[:, None] & (k < K)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + head * (K * N) + k[:, None] * N + outputs[None, :],
            mask=(k < K)[:, None] & (outputs < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, widened(weight, x.dtype), acc, input_precision="ieee")
    at = out_ptr + (tokens * NUM_HEADS + head)[:, None] * N + outputs[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (outputs < N)[None, :])


@triton.jit
def _prefetch_head(weight_ptr, first, K: tl.constexpr, N: tl.constexpr, OUTPUTS: tl.constexpr):
    """Ask for the outputs [first, first + OUTPUTS) of a head's matrix [K, N], if it has all of them."""
    ROWS: tl.constexpr = K & -K  # arange takes powers of two
    if first + OUTPUTS <= N:
        for start in tl.static_range(0, K, ROWS):
            prefetch_tile(weight_ptr + start * N + first, N, ROWS, OUTPUTS)


@triton.jit(do_not_specialize=["tile_index_ptr", "number_offset"])
def _folded_up_kernel(
    parts_ptr,  # [listed, heads, SPLITS, K] float32: what segments of keys gave; see latent_attention.py
    numbers_ptr,  # [2, listed, heads, SPLITS] float32: their highest scores, their sums of weights
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,
    weight_ptr,  # [heads, K, N]
    out_ptr,  # [tokens, heads, N]
    number_offset,
    NUM_HEADS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention's segments of one query and head added up, times the head's matrix."""
    allow_dependents(PDL)
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weight_ptr += head.to(tl.int64) * (K * N)
    if PDL:  # whole lines of memory, which programs beside it ask for, too
        WHOLE: tl.constexpr = OUTPUTS if OUTPUTS > 64 else 64
        _prefetch_head(weight_ptr, tl.program_id(2) * OUTPUTS // WHOLE * WHOLE, K, N, WHOLE)
    wait_for_predecessor(PDL)
    index = tl.load(tile_index_ptr + place)
    if index < 0:
        return
    line = (place * NUM_HEADS + head) * SPLITS
    shares, there = segment_shares(numbers_ptr + line, number_offset, tl.load(contexts_ptr + index), KEYS, SPLITS)
    segments, inner = tl.arange(0, SPLITS), tl.arange(0, BK)
    outputs = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    acc = tl.zeros([BK, OUTPUTS], tl.float32)
    for start in range(0, K, BK):
        k = start + inner
        parts = tl.load(
            parts_ptr + (line + segments)[:, None] * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0
        )
        x = tl.sum(parts * shares[:, None], axis=0).to(out_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(
            weight_ptr + k[:, None] * N + outputs[None, :], mask=(k < K)[:, None] & (outputs < N)[None, :], other=0.0
        )
        acc += x[:, None] * weight.to(tl.float32)
    at = (tl.load(query_starts_ptr + index).to(tl.int64) * NUM_HEADS + head) * N + outputs
    tl.store(out_ptr + at, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=outputs < N)


def tokens_at_once(num_tokens: int) -> int:
    """Where bits may depend on the number of tokens."""
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 128 else 64


FIXED_TOKENS = 32


def prepare_latent(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    key_up: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    cache: Tensor,
    at_once: int,
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Absorbed and rotated queries [n, heads, rank + rope]; normed, rotated latents go to the cache and to kept."""
    num_tokens, num_heads, _ = q.shape
    _, nope, rank = key_up.shape
    rope = latent.shape[1] - rank
    query = torch.empty(num_tokens, num_heads, rank + rope, dtype=q.dtype, device=q.device)
    outputs = min(_OUTPUTS, padded_dim(rank))
    parts = triton.cdiv(rank, outputs)
    _prepare_kernel[(triton.cdiv(num_tokens, at_once), num_heads + 1, parts)](
        q,
        latent,
        norm,
        key_up,
        *(rotation or (None, None)),
        slots,
        query,
        cache,
        kept,
        num_tokens,
        q.stride(0),
        latent.stride(0),
        cache.stride(1),
        eps,
        NUM_HEADS=num_heads,
        NOPE=nope,
        ROPE=rope,
        RANK=rank,
        BLOCK_SIZE=cache.shape[1],
        TOKENS=at_once,
        INNER=padded_dim(nope),
        OUTPUTS=outputs,
        KEPT=at_once // min(at_once, 1 << parts.bit_length() - 1),
        DIM=padded_dim(rank),
        PAIRS=max(16, triton.next_power_of_2(rope // 2)),
        num_warps=4,
        **launch_options(),
    )
    return query


def per_head(x: Tensor, weight: Tensor, at_once: int | None = None) -> Tensor:
    """x [n, heads, in], the last dimension contiguous, times weight [heads, in, out] -> [n, heads, out]."""
    num_tokens, num_heads, inner = x.shape
    n = weight.shape[2]
    at_once = at_once or tokens_at_once(num_tokens)
    out = torch.empty(num_tokens, num_heads, n, dtype=x.dtype, device=x.device)
    outputs = min(_OUTPUTS, padded_dim(n))
    if (at_once <= 32 or num_tokens <= _SOME_TOKENS) and outputs == _OUTPUTS:
        outputs //= 2  # more programs, of which each reads less
    _per_head_kernel[(triton.cdiv(num_tokens, at_once), num_heads, triton.cdiv(n, outputs))](
        x,
        weight,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        K=inner,
        N=n,
        TOKENS=at_once,
        OUTPUTS=outputs,
        BK=min(128, padded_dim(inner)),
        num_warps=4,
        num_stages=3,
        **launch_options(),
    )
    return out


def folds(listed: int) -> bool:
    """Whether `folded_up` is faster than two kernels, of which `per_head` reads a matrix once for many tokens."""
    return listed <= _FEW_TOKENS


def folded_up(
    segments: Segments, contexts: Tensor, query_starts: Tensor, tile_index: Tensor, weight: Tensor, num_tokens: int
) -> Tensor:
    """Attention's result, of which there are segments of single queries, times weight [heads, in, out] of each head.

    [num_tokens, heads, out]; only tokens of listed rows are computed.
    """
    heads, inner, n = weight.shape
    out = torch.empty(num_tokens, heads, n, dtype=segments.dtype, device=weight.device)
    # Few outputs of a program, all of the inner dimension at once: what counts here is how long one program takes.
    outputs = 16
    _folded_up_kernel[(tile_index.shape[0], heads, triton.cdiv(n, outputs))](
        segments.parts,
        segments.numbers,
        contexts,
        query_starts,
        tile_index,
        weight,
        out,
        segments.numbers[0].numel(),
        NUM_HEADS=heads,
        K=inner,
        N=n,
        KEYS=segments.keys,
        SPLITS=segments.parts.shape[2],
        OUTPUTS=outputs,
        BK=min(512, padded_dim(inner)),
        num_warps=4,
        **launch_options(),
    )
    return out


def per_head_fixed(x: Tensor, weight: Tensor) -> Tensor:
    """The same, with one tile for any number of tokens."""
    return per_head(x, weight, FIXED_TOKENS)
