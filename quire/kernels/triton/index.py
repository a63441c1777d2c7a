"""The sparse indexer of latent attention: its keys in the cache, scores of the keys that a token sees, the best ones.

A token's scores go through memory. Its best keys are found digit by digit of their scores' bits, from counts alone,
and written in the order of their positions: neither order nor ties depend on how programs run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.latent import kept_as
from quire.kernels.triton.launch import begin_dependent, launch_options, padded_dim
from quire.kernels.triton.widen import widened

_KEYS = 128  # of a program
_BLOCK = 2048  # scores that are looked at together
MOST_SCORES = 32 << 20  # of a launch: more tokens take several


@triton.jit
def _turned(
    x_ptr, rows, stride, cos_ptr, sin_ptr, inside, DIM: tl.constexpr, ROPE: tl.constexpr, PADDED: tl.constexpr
):
    """Lines of DIM features, of which the first ROPE are rotated in pairs i and i + ROPE / 2."""
    HALF: tl.constexpr = ROPE // 2
    dims = tl.arange(0, PADDED)
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROPE, dims - HALF, dims))
    mask = inside[:, None] & (dims < DIM)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + rows[:, None] * stride + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + dims, mask=dims < ROPE, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + dims, mask=dims < ROPE, other=0.0).to(tl.float32)
    return x * cos[None, :] + other * sin[None, :], mask


@triton.jit
def _coded(x):
    """(x divided by a scale for each line, the byte of that): the largest is in [128, 256), within fp8's 448."""
    bits = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True)
    exponents = tl.minimum(tl.maximum((bits >> 23) - 71, 0), 126)
    return x * (190 - exponents << 23).to(tl.float32, bitcast=True)[:, None], exponents


@triton.jit
def _scales(exponents):
    """See quire/ops/latent.py."""
    return (exponents.to(tl.int32) + 64 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _prepare_kernel(
    q_ptr,  # [tokens, heads, DIM], tokens q_stride apart
    key_ptr,
    weights_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_ptr,  # [tokens, heads, DIM]
    query_weights_ptr,  # [tokens, heads] float32
    keys_ptr,
    exponents_ptr,  # uint8, a key's at its line_stride; None: keys have no scales, and queries none either
    q_stride,
    key_stride,
    weights_stride,
    line_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    cos_ptr += token * ROPE
    sin_ptr += token * ROPE
    dims = tl.arange(0, PADDED)
    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS)
        inside = heads < NUM_HEADS
        out, mask = _turned(q_ptr + token * q_stride, heads, DIM, cos_ptr, sin_ptr, inside, DIM, ROPE, PADDED)
        at = query_ptr + (token * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
        out = out.to(query_ptr.dtype.element_ty)
        weights = tl.load(weights_ptr + token * weights_stride + heads, mask=inside, other=0.0).to(tl.float32)
        if exponents_ptr is not None:
            codes, exponents = _coded(out.to(tl.float32))
            out = kept_as(keys_ptr, codes).to(query_ptr.dtype.element_ty)
            weights *= _scales(exponents)
        tl.store(at, out, mask=mask)
        tl.store(query_weights_ptr + token * NUM_HEADS + heads, weights, mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        one = tl.arange(0, 1)
        key, key_mask = _turned(key_ptr + token * key_stride, one, 0, cos_ptr, sin_ptr, one < 1, DIM, ROPE, PADDED)
        # Rounded as activations are first; padding has slots of the null block, which stays zero.
        key = key.to(key_ptr.dtype.element_ty)
        written = slot + one >= BLOCK_SIZE
        if exponents_ptr is not None:
            key_codes, exponent = _coded(key.to(tl.float32))
            tl.store(exponents_ptr + slot * line_stride + one, exponent.to(tl.uint8), mask=written)
            kept = kept_as(keys_ptr, key_codes)
        else:
            kept = kept_as(keys_ptr, key)
        line = keys_ptr + slot * line_stride + dims[None, :] + one[:, None]
        tl.store(line, kept, mask=key_mask & written[:, None])


@triton.jit
def _row_of(token, starts_ptr, contexts_ptr, num_rows, ROWS: tl.constexpr):
    """The row of a token, and the number of keys that it sees; 0 for padding, which belongs to no row."""
    rows = tl.arange(0, ROWS)
    starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=2147483647)
    row = tl.maximum(tl.sum((starts <= token).to(tl.int32)) - 1, 0)
    end = tl.load(starts_ptr + row + 1)
    return row, tl.where(token < end, tl.load(contexts_ptr + row) - (end - token) + 1, 0)


@triton.jit(do_not_specialize=["first_token", "num_rows", "width"])
def _scores_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    exponents_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    starts_ptr,
    scores_ptr,  # [tokens of the launch, width] float32
    first_token,
    num_rows,
    width,
    table_stride,
    line_stride,
    TOP_K: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0) + first_token
    row, seen = _row_of(token, starts_ptr, contexts_ptr, num_rows, ROWS)
    keys = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    if (seen <= TOP_K) | (tl.program_id(1) * KEYS >= seen):  # then all are taken, or there are none here
        return
    table = tables_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    heads, dims = tl.arange(0, HEADS), tl.arange(0, PADDED)
    inside, exists = heads < NUM_HEADS, keys < seen
    at = (token.to(tl.int64) * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(query_ptr + at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    block = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    # Not a sum times line_stride: Triton 3.6 takes that for a multiple of 16, and reads 16 bytes at once.
    line = block * (BLOCK_SIZE * line_stride) + (keys % BLOCK_SIZE) * line_stride
    at_keys = keys_ptr + line[:, None] + dims[None, :]
    k = tl.load(at_keys, mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    weights = tl.load(weights_ptr + token.to(tl.int64) * NUM_HEADS + heads, mask=inside, other=0.0)
    if exponents_ptr is not None:  # queries are fp8 numbers, so that both sides are multiplied as such
        products = tl.maximum(tl.dot(q.to(k.dtype), tl.trans(k)), 0.0)
        scales = _scales(tl.load(exponents_ptr + line, mask=exists, other=0))
        scores = tl.sum(products * weights[:, None], axis=0) * scales
    else:
        products = tl.maximum(tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee"), 0.0)
        scores = tl.sum(products * weights[:, None], axis=0)
    tl.store(scores_ptr + tl.program_id(0).to(tl.int64) * width + keys, scores, mask=exists)


@triton.jit
def _places(scores_ptr, positions, seen):
    """The place of scores among all numbers, in [0, 2^32); NaN is the least."""
    scores = tl.load(scores_ptr + positions, mask=positions < seen, other=0.0) + 0.0  # no negative zero
    bits = scores.to(tl.uint32, bitcast=True)
    places = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(scores == scores, places, 0).to(tl.int64)


@triton.jit(do_not_specialize=["first_token", "num_tokens", "num_rows", "width"])
def _choose_kernel(
    scores_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    starts_ptr,
    slots_ptr,  # [tokens, TOP_K]
    counts_ptr,
    lines_ptr,
    firsts_ptr,
    zeros_ptr,
    first_token,
    num_tokens,
    num_rows,
    width,
    table_stride,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0) + first_token
    row, seen = _row_of(token, starts_ptr, contexts_ptr, num_rows, ROWS)
    scores_ptr += tl.program_id(0).to(tl.int64) * width
    slots_ptr += token.to(tl.int64) * TOP_K
    tl.store(lines_ptr + token, token.to(tl.int64))
    tl.store(firsts_ptr + token, token)
    tl.store(firsts_ptr + token + 1, token + 1)
    tl.store(zeros_ptr + token, 0)
    tl.store(counts_ptr + token, tl.maximum(tl.minimum(seen, TOP_K), 1))  # padding sees the null block
    bound = tl.zeros([], tl.int64)
    equals = tl.minimum(seen, TOP_K)
    bins = tl.arange(0, 256)
    if seen > TOP_K:
        for digit in tl.static_range(4):
            shift = 24 - 8 * digit
            counts = tl.zeros([256], tl.int32)
            for start in range(0, seen, BLOCK):
                positions = start + tl.arange(0, BLOCK)
                places = _places(scores_ptr, positions, seen)
                alike = (positions < seen) & (places >> (shift + 8) == bound >> (shift + 8))
                counts += tl.histogram((places >> shift & 255).to(tl.int32), 256, alike)
            reach = tl.cumsum(counts, axis=0, reverse=True)  # numbers with this digit or a higher one
            found = tl.sum((reach >= equals).to(tl.int32)) - 1
            equals -= tl.sum(tl.where(bins == found, reach - counts, 0))
            bound += found.to(tl.int64) << shift
    table = tables_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    written = 0
    for start in range(0, seen, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        exists = positions < seen
        taken = exists
        if seen > TOP_K:
            places = _places(scores_ptr, positions, seen)
            equal = (exists & (places == bound)).to(tl.int32)
            taken = exists & ((places > bound) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= equals)))
            equals -= tl.sum(equal)
        block = tl.load(table + positions // BLOCK_SIZE, mask=taken, other=0)
        slot = block * BLOCK_SIZE + positions % BLOCK_SIZE
        order = tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(slots_ptr + written + order, slot, mask=taken)
        written += tl.sum(taken.to(tl.int32))


def prepare_index(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rotated queries [n, heads, dim] and their weights [n, heads] float32; rotated keys go to `keys`.

    query [n, heads, dim], key [n, dim], weights [n, heads]: views whose last dimension is contiguous; keys [blocks,
    block_size, dim] is a part of the cache, and in fp8 has scales behind it: see quire/ops/latent.py.
    """
    tokens, heads, dim = query.shape
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    out_weights = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    _prepare_kernel[(tokens, 2)](
        query,
        key,
        weights,
        rotation[0],
        rotation[1],
        slots,
        out,
        out_weights,
        keys,
        _exponents(keys, dim),
        query.stride(0),
        key.stride(0),
        weights.stride(0),
        keys.stride(1),
        NUM_HEADS=heads,
        DIM=dim,
        ROPE=rotation[0].shape[-1],
        BLOCK_SIZE=keys.shape[1],
        HEADS=int(triton.next_power_of_2(heads)),
        PADDED=padded_dim(dim),
        num_warps=4,
        **launch_options(),
    )
    return out, out_weights


def _exponents(keys: Tensor, dim: int) -> Tensor | None:
    """Where scales are in the lines of index keys."""
    return keys.view(torch.uint8)[..., dim:] if keys.dtype == torch.float8_e4m3fn else None


class SelectedKeys(NamedTuple):
    """Each token as a row of its own, in the form in which attention reads rows and their tables."""

    slots: Tensor  # [n, top_k] int32
    counts: Tensor  # [n] int32
    lines: Tensor  # [n] int64: 0, 1, 2, ...
    firsts: Tensor  # [n + 1] int32, the same
    zeros: Tensor  # [n] int32


def select_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    starts: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """See quire/ops/latent.py."""
    width = tables.shape[1] * keys.shape[1]
    found = select_rows(query, weights, keys, tables, rows, contexts, starts, top_k, width)
    return found.slots, found.counts


def select_rows(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    starts: Tensor,
    top_k: int,
    max_context: int,
) -> SelectedKeys:
    """The same; no context is longer than max_context."""
    tokens, heads, dim = query.shape
    kind: dict[str, Any] = {"dtype": torch.int32, "device": query.device}
    found = SelectedKeys(
        torch.zeros(tokens, top_k, **kind),
        torch.empty(tokens, **kind),
        torch.empty(tokens, dtype=torch.int64, device=query.device),
        torch.empty(tokens + 1, **kind),
        torch.empty(tokens, **kind),
    )
    at_once = max(1, min(tokens, MOST_SCORES // max_context))
    scores = torch.empty(at_once, max_context, dtype=torch.float32, device=query.device)
    num_rows = rows.shape[0]
    shared = {"TOP_K": top_k, "BLOCK_SIZE": keys.shape[1], "ROWS": int(triton.next_power_of_2(num_rows))}
    lists = (tables, rows, contexts, starts)
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        _scores_kernel[(count, triton.cdiv(max_context, _KEYS))](
            query,
            weights,
            keys,
            _exponents(keys, dim),
            *lists,
            scores,
            first,
            num_rows,
            max_context,
            tables.stride(0),
            keys.stride(1),
            NUM_HEADS=heads,
            DIM=dim,
            HEADS=max(16, int(triton.next_power_of_2(heads))),
            PADDED=max(32, padded_dim(dim)),  # the fewest that a product of fp8 sums over
            KEYS=_KEYS,
            num_warps=4,
            **shared,
            **launch_options(),
        )
        _choose_kernel[(count,)](
            scores,
            *lists,
            *found,
            first,
            tokens,
            num_rows,
            max_context,
            tables.stride(0),
            BLOCK=min(_BLOCK, int(triton.next_power_of_2(max_context))),
            num_warps=8,
            **shared,
            **launch_options(),
        )
    return found
