"""Short convolutions over states, and the gates and norms around recurrences. See quire/ops/states.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.kernels.triton.state_blocks import SCAN, next_kept

_CHANNELS, _TOKENS, _ROWS = 128, 16, 64
_PAIRS, _SHORT = 16, 256  # pairs of a token and a group in a program, where a group has at most this width


@triton.jit(do_not_specialize=["num_rows"])
def _conv_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    weight_ptr,
    bias_ptr,
    cache_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    starts_ptr,
    out_ptr,
    stride,
    cache_stride,
    table_stride,
    num_rows,
    channels,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    index = tl.zeros([TOKENS], tl.int32)
    for first in range(0, num_rows, ROWS):
        places = first + tl.arange(0, ROWS)
        ends = tl.load(starts_ptr + 1 + places, mask=places < num_rows, other=2147483647)
        index += tl.sum((tokens[:, None] >= ends[None, :]).to(tl.int32), axis=1)
    is_token = index < num_rows
    row = tl.load(rows_ptr + index, mask=is_token, other=0)
    end = tl.load(starts_ptr + 1 + index, mask=is_token, other=0)
    begin = tl.load(starts_ptr + index, mask=is_token, other=0)
    context = tl.load(contexts_ptr + index, mask=is_token, other=0)
    first = context - (end - begin)
    position = context - end + tokens
    read = tl.load(
        tables_ptr + row * table_stride + tl.maximum(first - 1, 0) // BLOCK_SIZE, mask=is_token & (first > 0), other=0
    ).to(tl.int64)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = position - (WIDTH - 1) + tap
        source = (tokens - (WIDTH - 1) + tap).to(tl.int64)
        here = is_token & (at >= first)
        mask = here[:, None] & inside[None, :]
        value = tl.load(x_ptr + source[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if GATED:
            value *= tl.load(before_ptr + source[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
        past = is_token & (at >= 0) & (at < first)
        kept = read * cache_stride + (tl.maximum(at, 0) % SLOTS) * channels
        mask = past[:, None] & inside[None, :]
        value += tl.load(cache_ptr + kept[:, None] + columns[None, :], mask=mask, other=0.0)
        weight = tl.load(weight_ptr + columns * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        total += value * weight[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    if GATED:
        gates = tl.load(
            after_ptr + tokens.to(tl.int64)[:, None] * stride + columns[None, :],
            mask=is_token[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        total = gates * total
    total = tl.where(is_token[:, None], total, 0.0)
    tl.store(
        out_ptr + tokens.to(tl.int64)[:, None] * channels + columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=inside[None, :],
    )


@triton.jit
def _keep_conv_kernel(
    x_ptr,
    before_ptr,
    cache_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    starts_ptr,
    stride,
    cache_stride,
    table_stride,
    channels,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    CHANNELS: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    row, context = tl.load(rows_ptr + index), tl.load(contexts_ptr + index)
    begin, end = tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1)
    if end > begin:
        first = context - (end - begin)
        table = tables_ptr + row * table_stride
        read = tl.load(table + tl.maximum(first - 1, 0) // BLOCK_SIZE).to(tl.int64)
        entry, entries = first // BLOCK_SIZE, (context - 1) // BLOCK_SIZE + 1
        while entry < entries:
            entry, block = next_kept(table, entry, entries, SCAN)
            if block > 0:
                until = tl.minimum((entry + 1) * BLOCK_SIZE, context)
                # What a row's state has already need not be written again.
                for at in range(tl.maximum(first if block == read else 0, until - SLOTS), until):
                    slot = (at % SLOTS) * channels + columns
                    if at < first:
                        value = tl.load(cache_ptr + read * cache_stride + slot, mask=inside, other=0.0)
                    else:
                        token = (begin + at - first).to(tl.int64)
                        value = tl.load(x_ptr + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
                        if GATED:
                            factor = tl.load(before_ptr + token * stride + columns, mask=inside, other=0.0)
                            value *= factor.to(tl.float32)
                    tl.store(cache_ptr + block * cache_stride + slot, value, mask=inside)
            entry += 1


@triton.jit(do_not_specialize=["num_pairs"])
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_pairs,  # of a token and a group
    width,
    gate_stride,
    weight_stride,
    eps,
    NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    columns = tl.arange(0, BLOCK)
    token, group = (pair // GROUPS).to(tl.int64), pair % GROUPS
    inside = (pair < num_pairs)[:, None] & (columns < width)[None, :]
    place = pair.to(tl.int64)[:, None] * width + columns[None, :]
    gate_place = (token * gate_stride + group * width)[:, None] + columns[None, :]
    value = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_place, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        factor = factor * gate
    if NORM:
        if not NORM_FIRST:
            value = value * factor
        value = value / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)[:, None]
        weight_place = (group * weight_stride)[:, None] + columns[None, :]
        value = value * tl.load(weight_ptr + weight_place, mask=inside, other=0.0).to(tl.float32)
        if NORM_FIRST:
            value = value * factor
    else:
        value = value * factor
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=inside)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cache: Tensor, places: Any, shape: Any
) -> Tensor:
    return _conv(x, None, None, weight, bias, silu, cache, places, shape)


def gated_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, places: Any, shape: Any) -> Tensor:
    b, c, x = bcx.chunk(3, dim=-1)
    return _conv(x, b, c, weight, bias, False, cache, places, shape)


def _conv(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cache: Tensor,
    places: Any,
    shape: Any,
) -> Tensor:
    count, channels = x.shape[0], shape.conv_channels
    padded = triton.cdiv(count, _TOKENS) * _TOKENS
    out = torch.empty(padded, channels, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    rows = (places.tables, places.rows, places.contexts, places.starts)
    _conv_kernel[(padded // _TOKENS, blocks)](
        x,
        x if before is None else before,
        x if after is None else after,
        weight,
        weight if bias is None else bias,
        cache,
        *rows,
        out,
        x.stride(0),
        cache.stride(0),
        places.tables.stride(0),
        places.rows.shape[0],
        channels,
        BLOCK_SIZE=places.block_size,
        WIDTH=shape.conv_width,
        SLOTS=shape.conv_slots,
        GATED=before is not None,
        HAS_BIAS=bias is not None,
        SILU=silu,
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        CHANNELS=_CHANNELS,
        **launch_options(),
    )
    _keep_conv_kernel[(places.rows.shape[0], blocks)](
        x,
        x if before is None else before,
        cache,
        *rows,
        x.stride(0),
        cache.stride(0),
        places.tables.stride(0),
        channels,
        BLOCK_SIZE=places.block_size,
        SLOTS=shape.conv_slots,
        GATED=before is not None,
        CHANNELS=_CHANNELS,
        SCAN=SCAN,
        **launch_options(),
    )
    return out[:count]


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, sigmoid: bool = False
) -> Tensor:
    x = x.contiguous()
    out, size, num_pairs = torch.empty_like(x), x.shape[1] // groups, x.shape[0] * groups
    pairs = _PAIRS if size <= _SHORT else 1  # of every step, since bits depend on a tile's shape
    _gated_norm_kernel[(triton.cdiv(num_pairs, pairs),)](
        x,
        gate,
        weight,
        out,
        num_pairs,
        size,
        gate.stride(0),
        size if weight.shape[0] == x.shape[1] else 0,
        eps,
        NORM=True,
        NORM_FIRST=norm_first,
        SIGMOID=sigmoid,
        GROUPS=groups,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(size),
        **launch_options(),
    )
    return out


def gate(x: Tensor, gates: Tensor, silu: bool = False) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _gated_norm_kernel[(x.shape[0],)](
        x,
        gates,
        x,
        out,
        x.shape[0],
        x.shape[1],
        gates.stride(0),
        0,
        0.0,
        NORM=False,
        NORM_FIRST=False,
        SIGMOID=not silu,
        GROUPS=1,
        PAIRS=1,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        **launch_options(),
    )
    return out
