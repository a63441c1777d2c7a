"""Recurrent layers: matrices per head that tokens are folded into, one after the other.

See quire/ops/states.py for the layout of a state. A program has some columns of one head's matrix of one row and goes
through the row's tokens; no bit depends on how a sequence was cut into steps, or on other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.kernels.triton.state_blocks import SCAN, next_kept

Cut = tuple[int, int]  # columns of a program's part of a matrix, and its warps
ONE_CUT: Cut = (64, 4)  # where bits must not depend on the number of rows: they depend on this
_TOKENS = 16  # that a program norms, however few there are: bits depend on it
_LONG = 64  # tokens of a row; from there on values are widened: few of 16 bits are no asynchronous copy
_STAGES = 4  # tokens of a long prompt on their way to a program; bits do not depend on it
_MOST = 1 << 14  # values of a matrix that a program's registers hold


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["count"])
def _delta_inputs_kernel(
    qkv_ptr,
    decay_ptr,
    strength_ptr,
    a_ptr,
    bias_ptr,
    qk_ptr,
    decays_ptr,
    strengths_ptr,
    count,
    qkv_stride,
    decay_stride,
    strength_stride,
    scale,
    FLOOR: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    DECAYS: tl.constexpr,
    GATES: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_OF_GATES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    first, head = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1)
    if head < 2 * KEY_HEADS:
        tokens = first + tl.arange(0, TOKENS)[:, None]
        lanes = tl.arange(0, KEYS)[None, :]
        inside = (lanes < KEY_DIM) & (tokens < count)
        x = tl.load(qkv_ptr + tokens * qkv_stride + head * KEY_DIM + lanes, mask=inside, other=0.0).to(tl.float32)
        x = x / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) + 1e-6)
        if head < KEY_HEADS:
            x = x * scale
        tl.store(qk_ptr + (tokens * 2 * KEY_HEADS + head) * KEY_DIM + lanes, x, mask=inside)
    else:
        places = tl.arange(0, DECAYS)[None, :]
        gates = tl.arange(0, GATES)[None, :]
        bias = tl.load(bias_ptr + places, mask=places < HEADS * DECAY_DIM, other=0.0)
        a = tl.load(a_ptr + places // DECAY_DIM, mask=places < HEADS * DECAY_DIM, other=0.0)
        for part in range(TOKENS // TOKENS_OF_GATES):
            tokens = first + part * TOKENS_OF_GATES + tl.arange(0, TOKENS_OF_GATES)[:, None]
            known = (places < HEADS * DECAY_DIM) & (tokens < count)
            value = tl.load(decay_ptr + tokens * decay_stride + places, mask=known, other=0.0).to(tl.float32) + bias
            logs = FLOOR / (1.0 + tl.exp(a * value)) if FLOOR < 0.0 else a * _softplus(value)
            tl.store(decays_ptr + tokens * HEADS * DECAY_DIM + places, tl.exp(logs), mask=known)
            known = (gates < HEADS) & (tokens < count)
            value = tl.load(strength_ptr + tokens * strength_stride + gates, mask=known, other=0.0).to(tl.float32)
            tl.store(strengths_ptr + tokens * HEADS + gates, 1.0 / (1.0 + tl.exp(-value)), mask=known)


@triton.jit
def _scan_inputs_kernel(
    x_ptr,
    dt_ptr,
    bias_ptr,
    a_ptr,
    values_ptr,
    decays_ptr,
    x_stride,
    dt_stride,
    low,
    high,
    HAS_BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = heads < HEADS
    step = tl.load(dt_ptr + token * dt_stride + heads, mask=known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(bias_ptr + heads, mask=known, other=0.0)
    step = tl.minimum(tl.maximum(_softplus(step), low), high)
    columns = tl.arange(0, VALUES)
    mask = known[:, None] & (columns < VALUE_DIM)[None, :]
    places = heads[:, None] * VALUE_DIM + columns[None, :]
    x = tl.load(x_ptr + token * x_stride + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(values_ptr + token * HEADS * VALUE_DIM + places, x * step[:, None], mask=mask)
    lanes = tl.arange(0, DECAYS)
    mask = known[:, None] & (lanes < DECAY_DIM)[None, :]
    places = heads[:, None] * DECAY_DIM + lanes[None, :]
    a = tl.load(a_ptr + places, mask=mask, other=0.0)
    tl.store(decays_ptr + token * HEADS * DECAY_DIM + places, tl.exp(a * step[:, None]), mask=mask)


@triton.jit
def _fold(matrix, key, value, decay, strength, DELTA: tl.constexpr):
    matrix = matrix * decay[:, None]
    if DELTA:
        value = (value - tl.sum(matrix * key[:, None], axis=0)) * strength
    return matrix + key[:, None] * value[None, :]


@triton.jit
def matrix_before(
    cache_ptr,
    cache_stride,
    table,
    first,
    head,
    lanes,
    columns,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    ROLLBACK: tl.constexpr,
    DELTA: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A head's matrix [KEYS, COLUMNS] after the first tokens of a row, those in the ring of its state among them."""
    is_key, is_value = lanes < KEY_DIM, columns < VALUE_DIM
    of_decay = lanes if DECAY_DIM > 1 else lanes * 0
    key_head = head // (HEADS // KEY_HEADS)
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    OF_VALUES: tl.constexpr = HEADS * VALUE_DIM
    OF_DECAYS: tl.constexpr = HEADS * DECAY_DIM
    RING: tl.constexpr = OF_KEYS + OF_VALUES + OF_DECAYS + HEADS
    matrix = tl.zeros([KEYS, COLUMNS], tl.float32)
    if first > 0:
        state = cache_ptr + tl.load(table + (first - 1) // BLOCK_SIZE).to(tl.int64) * cache_stride
        place = head * KEY_DIM * VALUE_DIM + lanes[:, None] * VALUE_DIM + columns[None, :]
        matrix = tl.load(state + 1 + place, mask=is_key[:, None] & is_value[None, :], other=0.0)
        for at in range(tl.load(state).to(tl.int32), first):
            kept = state + 1 + HEADS * KEY_DIM * VALUE_DIM + (at % ROLLBACK) * RING
            key = tl.load(kept + key_head * KEY_DIM + lanes, mask=is_key, other=0.0)
            kept += OF_KEYS
            value = tl.load(kept + head * VALUE_DIM + columns, mask=is_value, other=0.0)
            kept += OF_VALUES
            decay = tl.load(kept + head * DECAY_DIM + of_decay, mask=is_key, other=0.0)
            matrix = _fold(matrix, key, value, decay, tl.load(kept + OF_DECAYS + head), DELTA)
    return matrix


# fmt: off
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _recurrence_kernel(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, strengths_ptr, skip_ptr, skipped_ptr, cache_ptr, tables_ptr,
    rows_ptr, contexts_ptr, starts_ptr, out_ptr, query_stride, key_stride, value_stride, skipped_stride,
    cache_stride, table_stride, num_rows, num_tokens,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, ROLLBACK: tl.constexpr, DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr, LONGEST: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    begin_dependent(PDL)
    index, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, KEYS)
    is_key, is_value = lanes < KEY_DIM, columns < VALUE_DIM
    OF_VALUES: tl.constexpr = HEADS * VALUE_DIM
    if index == num_rows:  # tokens of no row, behind all others
        for token in range(tl.load(starts_ptr + num_rows), num_tokens):
            nothing = tl.zeros([COLUMNS], out_ptr.dtype.element_ty)
            at = token * tl.full([1], OF_VALUES, tl.int64) + head * VALUE_DIM + columns
            tl.store(out_ptr + at, nothing, mask=is_value)
        return
    row, context = tl.load(rows_ptr + index), tl.load(contexts_ptr + index)
    begin, end = tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1)
    if (end > begin) & (end - begin <= LONGEST):
        first = context - (end - begin)
        key_head = head // (HEADS // KEY_HEADS)
        OF_DECAYS: tl.constexpr = HEADS * DECAY_DIM
        place = head * KEY_DIM * VALUE_DIM + lanes[:, None] * VALUE_DIM + columns[None, :]
        in_matrix = is_key[:, None] & is_value[None, :]
        table = tables_ptr + row * table_stride
        matrix = matrix_before(
            cache_ptr,
            cache_stride,
            table,
            first,
            head,
            lanes,
            columns,
            BLOCK_SIZE,
            HEADS,
            KEY_HEADS,
            KEY_DIM,
            VALUE_DIM,
            DECAY_DIM,
            ROLLBACK,
            DELTA,
            KEYS,
            COLUMNS,
        )
        entry, entries = first // BLOCK_SIZE, (context - 1) // BLOCK_SIZE + 1
        at = first
        while at < context:
            entry, block = next_kept(table, entry, entries, SCAN)
            until = tl.minimum((entry + 1) * BLOCK_SIZE, context)
            base = tl.where(block > 0, tl.maximum(first, until - ROLLBACK), context)
            for now in tl.range(at, base, num_stages=STAGES):  # tokens ahead are on their way while one is folded
                token = (begin + now - first).to(tl.int64)
                at_key, at_value = key_head * KEY_DIM + lanes, head * VALUE_DIM + columns
                key = tl.load(keys_ptr + token * key_stride + at_key, mask=is_key, other=0.0).to(tl.float32)
                query = tl.load(queries_ptr + token * query_stride + at_key, mask=is_key, other=0.0).to(tl.float32)
                value = tl.load(values_ptr + token * value_stride + at_value, mask=is_value, other=0.0).to(tl.float32)
                decays = decays_ptr + token * OF_DECAYS + head * DECAY_DIM
                if DECAY_DIM > 1:
                    matrix = matrix * tl.load(decays + lanes, mask=is_key, other=0.0)[:, None]
                else:
                    matrix = matrix * tl.load(decays + columns * 0)[None, :]
                if DELTA:
                    strength = tl.load(strengths_ptr + token * HEADS + head + columns * 0)
                    value = (value - tl.sum(matrix * key[:, None], axis=0)) * strength
                matrix = matrix + key[:, None] * value[None, :]
                out = tl.sum(matrix * query[:, None], axis=0)
                if HAS_SKIP:
                    skipped = tl.load(skipped_ptr + token * skipped_stride + at_value, mask=is_value, other=0.0)
                    out += tl.load(skip_ptr + head) * skipped.to(tl.float32)
                tl.store(out_ptr + token * OF_VALUES + at_value, out.to(out_ptr.dtype.element_ty), mask=is_value)
            if block > 0:
                tl.store(cache_ptr + block * cache_stride + 1 + place, matrix, mask=in_matrix)
            at = base
            entry += 1


@triton.jit
def _keep_inputs_kernel(
    keys_ptr,
    values_ptr,
    decays_ptr,
    strengths_ptr,
    cache_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    starts_ptr,
    key_stride,
    value_stride,
    cache_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    OF_DECAYS: tl.constexpr,
    MATRIX: tl.constexpr,
    ROLLBACK: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, context = tl.load(rows_ptr + index), tl.load(contexts_ptr + index)
    begin, end = tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1)
    RING: tl.constexpr = OF_KEYS + OF_VALUES + OF_DECAYS + HEADS
    if end > begin:
        first = context - (end - begin)
        entry, entries = first // BLOCK_SIZE, (context - 1) // BLOCK_SIZE + 1
        while entry < entries:
            entry, block = next_kept(tables_ptr + row * table_stride, entry, entries, SCAN)
            if block > 0:
                until = tl.minimum((entry + 1) * BLOCK_SIZE, context)
                base = tl.maximum(first, until - ROLLBACK)
                state = cache_ptr + block * cache_stride
                if tl.program_id(1) == 0:
                    tl.store(state, base.to(tl.float32))
                for at in range(base, until):
                    token = (begin + at - first).to(tl.int64)
                    of_values, of_decays = places - OF_KEYS, places - OF_KEYS - OF_VALUES
                    of_strengths = of_decays - OF_DECAYS
                    kept = tl.load(keys_ptr + token * key_stride + places, mask=places < OF_KEYS, other=0.0)
                    kept = kept.to(tl.float32)
                    mask = (of_values >= 0) & (of_values < OF_VALUES)
                    value = tl.load(values_ptr + token * value_stride + of_values, mask=mask, other=0.0)
                    kept += value.to(tl.float32)
                    mask = (of_decays >= 0) & (of_decays < OF_DECAYS)
                    kept += tl.load(decays_ptr + token * OF_DECAYS + of_decays, mask=mask, other=0.0)
                    mask = (of_strengths >= 0) & (of_strengths < HEADS)
                    if DELTA:
                        kept += tl.load(strengths_ptr + token * HEADS + of_strengths, mask=mask, other=0.0)
                    else:
                        kept = tl.where(mask, 1.0, kept)
                    tl.store(state + 1 + MATRIX + (at % ROLLBACK) * RING + places, kept, mask=places < RING)
                entry += 1


class Inputs(NamedTuple):
    """What tokens fold into matrices and read of them; see `recur` in quire/ops/states.py."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    strengths: Tensor | None  # of the delta rule
    skip: tuple[Tensor, Tensor] | None  # a factor per head, and what is added to the result times it


def delta_inputs(
    qkv: Tensor, decay: Tensor, strength: Tensor, a: Tensor, dt_bias: Tensor, shape: Any, floor: float = 0.0
) -> Inputs:
    count, heads, keys = qkv.shape[0], shape.num_heads, shape.num_key_heads
    qk = torch.empty(count, 2 * keys, shape.key_dim, dtype=torch.float32, device=qkv.device)
    decays = torch.empty(count, heads, shape.decay_dim, dtype=torch.float32, device=qkv.device)
    strengths = torch.empty(count, heads, dtype=torch.float32, device=qkv.device)
    decay_lanes = triton.next_power_of_2(heads * shape.decay_dim)
    _delta_inputs_kernel[(triton.cdiv(count, _TOKENS), 2 * keys + 1)](
        qkv,
        decay,
        strength,
        a,
        dt_bias,
        qk,
        decays,
        strengths,
        count,
        qkv.stride(0),
        decay.stride(0),
        strength.stride(0),
        shape.key_dim**-0.5,
        FLOOR=floor,
        HEADS=heads,
        KEY_HEADS=keys,
        KEY_DIM=shape.key_dim,
        DECAY_DIM=shape.decay_dim,
        KEYS=triton.next_power_of_2(shape.key_dim),
        DECAYS=decay_lanes,
        GATES=triton.next_power_of_2(heads),
        TOKENS=_TOKENS,
        TOKENS_OF_GATES=max(1, min(_TOKENS, 4096 // decay_lanes)),
        **launch_options(),
    )
    return Inputs(qk[:, :keys], qk[:, keys:], qkv[:, 2 * keys * shape.key_dim :], decays, strengths, None)


def space_inputs(
    xbc: Tensor, dt: Tensor, dt_bias: Tensor, a: Tensor, skip: Tensor, limits: tuple[float, float], shape: Any
) -> Inputs:
    width, keys = shape.num_heads * shape.value_dim, shape.num_key_heads * shape.key_dim
    x, b, c = xbc.split([width, keys, keys], dim=-1)
    return Inputs(c, b, *_scan_inputs(x, dt, dt_bias, a, limits, shape), None, (skip, x))


def linear_inputs(qkv: Tensor, decay: Tensor, shape: Any) -> Inputs:
    q, k, v = (part.flatten(1) for part in qkv.view(qkv.shape[0], shape.num_heads, 3, -1).unbind(2))
    return Inputs(q, k, v, decay[None].expand(qkv.shape[0], -1).contiguous(), None, None)


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    cache: Tensor,
    places: Any,
    shape: Any,
    floor: float = 0.0,
) -> Tensor:
    inputs = delta_inputs(qkv, decay, strength, a, dt_bias, shape, floor)
    if qkv.shape[0] >= _LONG * places.rows.shape[0]:
        inputs = inputs._replace(values=inputs.values.float())
    return recur(inputs, cache, places, shape, qkv.dtype)


def state_space(
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    skip: Tensor,
    dt_limits: tuple[float, float],
    cache: Tensor,
    places: Any,
    shape: Any,
) -> Tensor:
    return recur(space_inputs(xbc, dt, dt_bias, a, skip, dt_limits, shape), cache, places, shape, xbc.dtype)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    skip: Tensor,
    cache: Tensor,
    places: Any,
    shape: Any,
) -> Tensor:
    values, decays = _scan_inputs(x, dt, None, a, (0.0, float("inf")), shape)
    return recur(Inputs(c, b, values, decays, None, (skip, x)), cache, places, shape, x.dtype)


def linear_attention(qkv: Tensor, decay: Tensor, cache: Tensor, places: Any, shape: Any) -> Tensor:
    return recur(linear_inputs(qkv, decay, shape), cache, places, shape, qkv.dtype)


def _scan_inputs(
    x: Tensor, dt: Tensor, dt_bias: Tensor | None, a: Tensor, limits: tuple[float, float], shape: Any
) -> tuple[Tensor, Tensor]:
    count, heads = x.shape[0], shape.num_heads
    values = torch.empty(count, heads * shape.value_dim, dtype=torch.float32, device=x.device)
    decays = torch.empty(count, heads, shape.decay_dim, dtype=torch.float32, device=x.device)
    block = 16
    _scan_inputs_kernel[(count, triton.cdiv(heads, block))](
        x,
        dt,
        a if dt_bias is None else dt_bias,
        a,
        values,
        decays,
        x.stride(0),
        dt.stride(0),
        limits[0],
        min(limits[1], 3e38),
        HAS_BIAS=dt_bias is not None,
        HEADS=heads,
        VALUE_DIM=shape.value_dim,
        DECAY_DIM=shape.decay_dim,
        VALUES=triton.next_power_of_2(shape.value_dim),
        DECAYS=triton.next_power_of_2(shape.decay_dim),
        BLOCK=block,
        **launch_options(),
    )
    return values, decays


def recur(inputs: Inputs, cache: Tensor, places: Any, shape: Any, dtype: torch.dtype, cut: Cut = ONE_CUT) -> Tensor:
    out = fold_tokens(inputs, cache, places, shape, dtype, cut=cut)
    keep_inputs(inputs, cache, places, shape)
    return out


def fold_tokens(
    inputs: Inputs,
    cache: Tensor,
    places: Any,
    shape: Any,
    dtype: torch.dtype,
    longest: int = 1 << 30,
    cut: Cut = ONE_CUT,
) -> Tensor:
    """Results of the rows of at most `longest` tokens, whose matrices it leaves in the cache.

    Those of tokens of no row are zero, those of longer rows are anything.
    """
    queries, given, values, decays, strengths, skip = inputs
    num_rows = places.rows.shape[0]
    out = torch.empty(values.shape[0], shape.num_heads * shape.value_dim, dtype=dtype, device=values.device)
    factors, skipped = skip or (values, values)
    keys = triton.next_power_of_2(shape.key_dim)
    is_long = longest > _LONG and values.shape[0] >= _LONG * num_rows
    columns = min(cut[0], triton.next_power_of_2(shape.value_dim), max(16, _MOST // keys))
    _recurrence_kernel[(num_rows + 1, shape.num_heads, triton.cdiv(shape.value_dim, columns))](
        queries,
        given,
        values,
        decays,
        decays if strengths is None else strengths,
        factors,
        skipped,
        cache[:, shape.conv_size :],
        places.tables,
        places.rows,
        places.contexts,
        places.starts,
        out,
        queries.stride(0),
        given.stride(0),
        values.stride(0),
        skipped.stride(0),
        cache.stride(0),
        places.tables.stride(0),
        num_rows,
        values.shape[0],
        BLOCK_SIZE=places.block_size,
        HEADS=shape.num_heads,
        KEY_HEADS=shape.num_key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        DECAY_DIM=shape.decay_dim,
        ROLLBACK=shape.rollback,
        DELTA=strengths is not None,
        HAS_SKIP=skip is not None,
        LONGEST=longest,
        KEYS=keys,
        COLUMNS=columns,
        SCAN=SCAN if is_long else 1,
        STAGES=_STAGES if is_long else 1,
        num_warps=cut[1],
        **launch_options(),
    )
    return out


def keep_inputs(inputs: Inputs, cache: Tensor, places: Any, shape: Any) -> None:
    """Write to the states that a step leaves what their rings hold; after all that reads the states before it."""
    block = 1024
    _keep_inputs_kernel[(places.rows.shape[0], triton.cdiv(sum(shape.input_sizes), block))](
        inputs.keys,
        inputs.values,
        inputs.decays,
        inputs.decays if inputs.strengths is None else inputs.strengths,
        cache[:, shape.conv_size :],
        places.tables,
        places.rows,
        places.contexts,
        places.starts,
        inputs.keys.stride(0),
        inputs.values.stride(0),
        cache.stride(0),
        places.tables.stride(0),
        BLOCK_SIZE=places.block_size,
        HEADS=shape.num_heads,
        OF_KEYS=shape.input_sizes[0],
        OF_VALUES=shape.input_sizes[1],
        OF_DECAYS=shape.input_sizes[2],
        MATRIX=shape.matrix_size,
        ROLLBACK=shape.rollback,
        DELTA=inputs.strengths is not None,
        BLOCK=block,
        SCAN=SCAN,
        **launch_options(),
    )
