"""Kimi delta attention over long rows: channels of keys that decay by themselves; see chunked_states.py.

Sums g of log decays are vectors here, and k_i k_j exp(g_i - g_j) is a sum over channels. So that no exponent is above
zero, blocks of BLOCK tokens multiply k_i exp(g_i - r) by k_j exp(r - g_j) of blocks before theirs, where r is g of
their first token, and tokens of one block are multiplied pair by pair.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.chunks import LEAST_LOG, as_logs, find_chunk, inverse_of, store_strong_values
from quire.kernels.triton.launch import begin_dependent, launch_options

_BLOCK = 16


@triton.jit(do_not_specialize=["num_rows"])
def _decayed_kernel(
    queries_ptr,
    keys_ptr,
    decays_ptr,
    contexts_ptr,
    starts_ptr,
    sums_ptr,
    decayed_ptr,
    query_stride,
    key_stride,
    num_rows,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SHORT: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of log decays; queries times what they are since the chunk's begin, keys times what is left at its end."""
    begin_dependent(PDL)
    head = tl.program_id(1)
    begin, count, first, chunk = find_chunk(tl.program_id(0), contexts_ptr, starts_ptr, num_rows, CHUNK, SLOT, ROWS)
    if (count > SHORT) & (chunk * CHUNK < first + count):
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        lanes = tl.arange(0, KEYS)
        inside = ((position >= first) & (position < first + count))[:, None] & (lanes < KEY_DIM)[None, :]
        token = (begin + position - first).to(tl.int64)[:, None]
        at = (token * HEADS + head) * KEY_DIM + lanes[None, :]
        logs = as_logs(tl.load(decays_ptr + at, mask=inside, other=1.0), LEAST)
        sums = tl.cumsum(logs, axis=0)
        tl.store(sums_ptr + at, sums, mask=inside)
        of_head = head * KEY_DIM + lanes[None, :]
        query = tl.load(queries_ptr + token * query_stride + of_head, mask=inside, other=0.0)
        key = tl.load(keys_ptr + token * key_stride + of_head, mask=inside, other=0.0)
        left = tl.minimum(tl.sum(logs, axis=0)[None, :] - sums, 0.0)
        decayed = decayed_ptr + token * (2 * HEADS * KEY_DIM) + of_head
        tl.store(decayed, (query * tl.exp(sums)).to(decayed_ptr.dtype.element_ty), mask=inside)
        tl.store(decayed + HEADS * KEY_DIM, (key * tl.exp(left)).to(decayed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _channel_scores_kernel(
    queries_ptr,
    keys_ptr,
    sums_ptr,
    strengths_ptr,
    contexts_ptr,
    starts_ptr,
    scores_ptr,
    pairs_ptr,
    query_stride,
    key_stride,
    num_rows,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SHORT: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a block's tokens with all before them in the chunk: queries by keys, and keys by keys times strengths."""
    begin_dependent(PDL)
    head, block = tl.program_id(1), tl.program_id(2)
    begin, count, first, chunk = find_chunk(tl.program_id(0), contexts_ptr, starts_ptr, num_rows, CHUNK, SLOT, ROWS)
    base = chunk * CHUNK + block * BLOCK
    if (count > SHORT) & (base < first + count) & (base + BLOCK > first):
        dtype = scores_ptr.dtype.element_ty
        places, lanes = tl.arange(0, BLOCK), tl.arange(0, KEYS)
        is_key = lanes < KEY_DIM
        of_head = head * KEY_DIM + lanes
        position = base + places
        inside = (position >= first) & (position < first + count)
        token = (begin + position - first).to(tl.int64)
        mask = inside[:, None] & is_key[None, :]
        query = tl.load(queries_ptr + token[:, None] * query_stride + of_head[None, :], mask=mask, other=0.0)
        key = tl.load(keys_ptr + token[:, None] * key_stride + of_head[None, :], mask=mask, other=0.0)
        sums = tl.load(sums_ptr + token[:, None] * (HEADS * KEY_DIM) + of_head[None, :], mask=mask, other=0.0)
        strength = tl.load(strengths_ptr + token * HEADS + head, mask=inside, other=0.0)
        line = (token * HEADS + head) * CHUNK
        origin = (begin - first).to(tl.int64)  # of positions among the step's tokens
        start = tl.load(
            sums_ptr + (origin + tl.maximum(base, first)) * (HEADS * KEY_DIM) + of_head, mask=is_key, other=0.0
        )
        since = tl.exp(tl.minimum(sums - start[None, :], 0.0))
        query_since, key_since = (query * since).to(dtype), (key * since).to(dtype)
        for other in range(0, block):
            place = chunk * CHUNK + other * BLOCK + places
            there = (place >= first)[:, None] & is_key[None, :]
            earlier = (begin + place - first).to(tl.int64)[:, None]
            their = tl.load(keys_ptr + earlier * key_stride + of_head[None, :], mask=there, other=0.0)
            until = tl.load(sums_ptr + earlier * (HEADS * KEY_DIM) + of_head[None, :], mask=there, other=0.0)
            turned = tl.trans((their * tl.exp(tl.minimum(start[None, :] - until, 0.0))).to(dtype))
            at = line[:, None] + other * BLOCK + places[None, :]
            scores = tl.dot(query_since, turned, input_precision=PRECISION)
            tl.store(scores_ptr + at, scores.to(dtype), mask=inside[:, None])
            pairs = tl.dot(key_since, turned, input_precision=PRECISION) * strength[:, None]
            tl.store(pairs_ptr + at, pairs, mask=inside[:, None])
        for other in range(0, BLOCK):
            place = base + other
            at = origin + tl.minimum(tl.maximum(place, first), first + count - 1)
            their = tl.load(keys_ptr + at * key_stride + of_head, mask=is_key, other=0.0)
            their = tl.where((place >= first) & (place < first + count), their, 0.0)
            until = tl.load(sums_ptr + at * (HEADS * KEY_DIM) + of_head, mask=is_key, other=0.0)
            weighted = their[None, :] * tl.exp(tl.minimum(sums - until[None, :], 0.0))
            scores = tl.where(places >= other, tl.sum(query * weighted, axis=1), 0.0)
            tl.store(scores_ptr + line + block * BLOCK + other, scores.to(dtype), mask=inside)
            pairs = tl.sum(key * weighted, axis=1) * strength
            tl.store(pairs_ptr + line + block * BLOCK + other, pairs, mask=inside)
        for other in range(block + 1, CHUNK // BLOCK):
            at = line[:, None] + other * BLOCK + places[None, :]
            tl.store(scores_ptr + at, tl.zeros([BLOCK, BLOCK], dtype), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _channel_delta_kernel(
    keys_ptr,
    values_ptr,
    sums_ptr,
    strengths_ptr,
    pairs_ptr,
    contexts_ptr,
    starts_ptr,
    w_ptr,
    u_ptr,
    key_stride,
    value_stride,
    num_rows,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SHORT: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """U and W of the delta rule."""
    begin_dependent(PDL)
    head = tl.program_id(1)
    begin, count, first, chunk = find_chunk(tl.program_id(0), contexts_ptr, starts_ptr, num_rows, CHUNK, SLOT, ROWS)
    if (count > SHORT) & (chunk * CHUNK < first + count):
        dtype = w_ptr.dtype.element_ty
        places, lanes = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        position = chunk * CHUNK + places
        inside = (position >= first) & (position < first + count)
        token = (begin + position - first).to(tl.int64)
        is_pair = inside[:, None] & (position >= first)[None, :] & (places[:, None] > places[None, :])
        pairs = tl.load(
            pairs_ptr + (token[:, None] * HEADS + head) * CHUNK + places[None, :], mask=is_pair, other=0.0
        )
        inverse = inverse_of(pairs, dtype, CHUNK, LEVELS).to(dtype)
        strength = tl.load(strengths_ptr + token * HEADS + head, mask=inside, other=0.0)[:, None]
        mask = inside[:, None] & (lanes < KEY_DIM)[None, :]
        at = (token[:, None] * HEADS + head) * KEY_DIM + lanes[None, :]
        key = tl.load(keys_ptr + token[:, None] * key_stride + head * KEY_DIM + lanes[None, :], mask=mask, other=0.0)
        key = key * strength * tl.exp(tl.load(sums_ptr + at, mask=mask, other=0.0))
        w = tl.dot(inverse, key.to(dtype), input_precision=PRECISION)
        tl.store(w_ptr + at, w.to(dtype), mask=mask)
        # fmt: off
        store_strong_values(
            inverse, strength, token, inside, values_ptr, value_stride, u_ptr, head,
            HEADS, VALUE_DIM, VALUES, PRECISION,
        )
        # fmt: on


@triton.jit
def decayed_until(
    before, first, keys, sums, position, lanes, key_stride, KEY_DIM: tl.constexpr, SUM_STRIDE: tl.constexpr
):
    """(the chunk's keys [CHUNK, KEYS] of tokens before `before`, as they are decayed there; log decays until there).

    `first` is the position of the chunk's first token in the step; keys and sums point to the chunk's first token.
    """
    is_key = lanes < KEY_DIM
    start = tl.min(position, axis=0)
    known = ((position >= first) & (position < before))[:, None] & is_key[None, :]
    token = (position - start)[:, None]
    key = tl.load(keys + token * key_stride + lanes[None, :], mask=known, other=0.0)
    until = tl.load(sums + token * SUM_STRIDE + lanes[None, :], mask=known, other=0.0)
    kept = tl.load(sums + (tl.maximum(before - 1, first) - start) * SUM_STRIDE + lanes, mask=is_key, other=0.0)
    kept = tl.where(before > first, kept, 0.0)
    return key * tl.exp(tl.minimum(kept[None, :] - until, 0.0)), kept


def channel_parts(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    strengths: Tensor,
    scores: Tensor,
    decayed: Tensor,
    w: Tensor,
    u: Tensor,
    places: Any,
    sizes: dict[str, Any],
    of_delta: dict[str, Any],
) -> Tensor:
    """Sums of log decays [n, heads, key_dim] float32; fills scores, decayed queries and keys, w and u.

    Of rows that are cut into chunks.
    """
    count, heads = decays.shape[:2]
    sums, pairs = torch.empty_like(decays), torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    rows, strides = (places.contexts, places.starts), (queries.stride(0), keys.stride(0))
    num_rows, slots = places.rows.shape[0], count // sizes["SLOT"]
    shared = {**sizes, **launch_options()}
    _decayed_kernel[(slots, heads)](
        queries, keys, decays, *rows, sums, decayed, *strides, num_rows, LEAST=LEAST_LOG, **shared
    )
    _channel_scores_kernel[(slots, heads, sizes["CHUNK"] // _BLOCK)](
        queries,
        keys,
        sums,
        strengths,
        *rows,
        scores,
        pairs,
        *strides,
        num_rows,
        BLOCK=_BLOCK,
        PRECISION=of_delta["PRECISION"],
        **shared,
    )
    _channel_delta_kernel[(slots, heads)](
        keys,
        values,
        sums,
        strengths,
        pairs,
        *rows,
        w,
        u,
        keys.stride(0),
        values.stride(0),
        num_rows,
        **of_delta,
        **shared,
    )
    return sums
