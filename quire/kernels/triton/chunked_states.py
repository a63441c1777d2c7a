"""Recurrent layers over long rows: matmuls within and across chunks of 64 tokens at fixed positions of a sequence.

With g the sums of log decays in a chunk, a matrix S becomes exp(g_last) S + (exp(g_last - g) K)^T V, and queries
read exp(g) Q S + (Q K^T exp(g_i - g_j) for j <= i) V. Under the delta rule V is U - W S, where U and W are the
inverse of I + A times strengths V and strengths exp(g) K, with A_ij = strength_i k_i k_j exp(g_i - g_j) for j < i.
One kernel computes what needs no state, for all chunks at once; another goes through a row's chunks.
Rows of few tokens are folded token by token, as in quire/kernels/triton/states.py. Bits differ from those, so steps
that cut a sequence elsewhere differ in their last bits: this is for the fast mode.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.channel_states import channel_parts, decayed_until
from quire.kernels.triton.chunks import CHUNK, LEAST_LOG, SLOT, as_logs, find_chunk, inverse_of, store_strong_values
from quire.kernels.triton.launch import begin_dependent, launch_options, stages_within
from quire.kernels.triton.states import (
    Inputs,
    delta_inputs,
    fold_tokens,
    keep_inputs,
    linear_inputs,
    matrix_before,
    recur,
    space_inputs,
)
from quire.types.cache import STATE_SHORT

_ROWS = 64
_SOME_ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _within_chunks_kernel(
    queries_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    strengths_ptr,
    contexts_ptr,
    starts_ptr,
    scores_ptr,
    rounded_ptr,
    w_ptr,
    u_ptr,
    query_stride,
    key_stride,
    value_stride,
    num_rows,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    SHORT: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEVELS: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    head = tl.program_id(1)
    begin, count, first, chunk = find_chunk(tl.program_id(0), contexts_ptr, starts_ptr, num_rows, CHUNK, SLOT, ROWS)
    if (count > SHORT) & (chunk * CHUNK < first + count):
        dtype = scores_ptr.dtype.element_ty
        key_head = head // (HEADS // KEY_HEADS)
        places = tl.arange(0, CHUNK)
        position = chunk * CHUNK + places
        inside = (position >= first) & (position < first + count)
        token = (begin + position - first).to(tl.int64)
        lanes = tl.arange(0, KEYS)
        mask = inside[:, None] & (lanes < KEY_DIM)[None, :]
        of_key = key_head * KEY_DIM + lanes[None, :]
        query = tl.load(queries_ptr + token[:, None] * query_stride + of_key, mask=mask, other=0.0).to(dtype)
        key = tl.load(keys_ptr + token[:, None] * key_stride + of_key, mask=mask, other=0.0).to(dtype)
        decays = tl.load(decays_ptr + token * HEADS + head, mask=inside, other=1.0)
        total = tl.cumsum(as_logs(decays, LEAST), axis=0)
        is_causal = places[:, None] >= places[None, :]
        factors = tl.exp(tl.where(is_causal, total[:, None] - total[None, :], 0.0))
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = tl.where(is_causal, scores * factors, 0.0)
        of_token = scores_ptr + (token[:, None] * HEADS + head) * CHUNK + places[None, :]
        tl.store(of_token, scores.to(dtype), mask=inside[:, None])
        if DELTA:
            if head % (HEADS // KEY_HEADS) == 0:
                rounded = rounded_ptr + token[:, None] * (2 * KEY_HEADS * KEY_DIM) + of_key
                tl.store(rounded, query, mask=mask)
                tl.store(rounded + KEY_HEADS * KEY_DIM, key, mask=mask)
            strength = tl.load(strengths_ptr + token * HEADS + head, mask=inside, other=0.0)
            a = tl.dot(key, tl.trans(key), input_precision=PRECISION) * factors * strength[:, None]
            a = tl.where(places[:, None] > places[None, :], a, 0.0)
            inverse = inverse_of(a, dtype, CHUNK, LEVELS).to(dtype)
            # Read again: registers that hold keys meanwhile are wanted for the inverse.
            key = tl.load(keys_ptr + token[:, None] * key_stride + of_key, mask=mask, other=0.0)
            scaled = (key.to(tl.float32) * (strength * tl.exp(total))[:, None]).to(dtype)
            w = tl.dot(inverse, scaled, input_precision=PRECISION)
            tl.store(w_ptr + (token[:, None] * HEADS + head) * KEY_DIM + lanes[None, :], w.to(dtype), mask=mask)
            # fmt: off
            store_strong_values(
                inverse, strength[:, None], token, inside, values_ptr, value_stride, u_ptr, head,
                HEADS, VALUE_DIM, VALUES, PRECISION,
            )
            # fmt: on


@triton.jit
def _leave_states(
    places_ptr,
    cache_stride,
    table,
    matrix,
    turned,
    value,
    logs,
    keys,
    sums,
    key_stride,
    lanes,
    in_matrix,
    position,
    first,
    context,
    KEY_DIM: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROLLBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store matrices as they are before tokens of this chunk, for entries whose rings begin at those tokens.

    keys and sums, of CHANNELS alone, point to the chunk's first token.
    """
    start, total = tl.min(position, axis=0), tl.cumsum(logs, axis=0)
    low, high = tl.maximum(first, start), tl.minimum(context, start + CHUNK)
    entries = low // BLOCK_SIZE + tl.arange(0, ENTRIES)
    bases = tl.maximum(first, tl.minimum((entries + 1) * BLOCK_SIZE, context) - ROLLBACK)
    known = (entries * BLOCK_SIZE < context) & (bases >= low) & (bases < high)
    if tl.max(tl.load(table + entries, mask=known, other=0), axis=0) > 0:
        for entry in range(low // BLOCK_SIZE, low // BLOCK_SIZE + ENTRIES):
            base = tl.maximum(first, tl.minimum((entry + 1) * BLOCK_SIZE, context) - ROLLBACK)
            if (entry * BLOCK_SIZE < context) & (base >= low) & (base < high):
                block = tl.load(table + entry).to(tl.int64)
                if block > 0:
                    if CHANNELS:
                        key, until = decayed_until(
                            base, low, keys, sums, position, lanes, key_stride, KEY_DIM, SUM_STRIDE
                        )
                        added = tl.dot(
                            tl.trans(key.to(turned.dtype)), value.to(turned.dtype), input_precision=PRECISION
                        )
                        left = matrix * tl.exp(until)[:, None] + added
                    else:
                        is_before = position < base
                        kept = tl.sum(tl.where(is_before, logs, 0.0), axis=0)
                        factors = tl.where(is_before, tl.exp(tl.where(is_before, kept - total, 0.0)), 0.0)
                        scaled = (value * factors[:, None]).to(turned.dtype)
                        left = matrix * tl.exp(kept) + tl.dot(turned, scaled, input_precision=PRECISION)
                    tl.store(places_ptr + block * cache_stride, left, mask=in_matrix)


# fmt: off
@triton.jit
def _across_chunks_kernel(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, scores_ptr, w_ptr, raw_keys_ptr, sums_ptr, skip_ptr, skipped_ptr,
    cache_ptr, tables_ptr, rows_ptr, contexts_ptr, starts_ptr, out_ptr, query_stride, key_stride, raw_key_stride,
    value_stride, skipped_stride, cache_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROLLBACK: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    HAS_SKIP: tl.constexpr, SHORT: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr, LEAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    begin_dependent(PDL)
    index, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    lanes, places = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    is_key, is_value = lanes < KEY_DIM, columns < VALUE_DIM
    row, context = tl.load(rows_ptr + index), tl.load(contexts_ptr + index)
    begin, end = tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1)
    if end - begin > SHORT:
        dtype = scores_ptr.dtype.element_ty
        first = context - (end - begin)
        table = tables_ptr + row * table_stride
        key_head = head // (HEADS // KEY_HEADS)
        in_matrix = is_key[:, None] & is_value[None, :]
        place = head * KEY_DIM * VALUE_DIM + lanes[:, None] * VALUE_DIM + columns[None, :]
        DECAY_DIM: tl.constexpr = KEY_DIM if CHANNELS else 1
        # fmt: off
        matrix = matrix_before(
            cache_ptr, cache_stride, table, first, head, lanes, columns, BLOCK_SIZE, HEADS,
            KEY_HEADS, KEY_DIM, VALUE_DIM, DECAY_DIM, ROLLBACK, DELTA, KEYS, COLUMNS,
        )
        # fmt: on
        for chunk in range(first // CHUNK, (context - 1) // CHUNK + 1):
            position = chunk * CHUNK + places
            inside = (position >= first) & (position < context)
            token = (begin + position - first).to(tl.int64)
            of_key = inside[:, None] & is_key[None, :]
            of_value = inside[:, None] & is_value[None, :]
            at_key = key_head * KEY_DIM + lanes[None, :]
            at_value = head * VALUE_DIM + columns[None, :]
            query = tl.load(queries_ptr + token[:, None] * query_stride + at_key, mask=of_key, other=0.0)
            key = tl.load(keys_ptr + token[:, None] * key_stride + at_key, mask=of_key, other=0.0)
            value = tl.load(values_ptr + token[:, None] * value_stride + at_value, mask=of_value, other=0.0)
            scores = tl.load(
                scores_ptr + (token[:, None] * HEADS + head) * CHUNK + places[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            logs = tl.zeros([CHUNK], tl.float32)
            if not CHANNELS:
                logs = as_logs(tl.load(decays_ptr + token * HEADS + head, mask=inside, other=1.0), LEAST)
            total = tl.cumsum(logs, axis=0)
            held = matrix.to(dtype)
            value = value.to(tl.float32)
            if DELTA:
                at_w = (token[:, None] * HEADS + head) * KEY_DIM + lanes[None, :]
                w = tl.load(w_ptr + at_w, mask=of_key, other=0.0)
                value -= tl.dot(w, held, input_precision=PRECISION)
            out = tl.dot(query.to(dtype), held, input_precision=PRECISION) * tl.exp(total)[:, None]
            out += tl.dot(scores, value.to(dtype), input_precision=PRECISION)
            if HAS_SKIP:
                at_skipped = token[:, None] * skipped_stride + at_value
                skipped = tl.load(skipped_ptr + at_skipped, mask=of_value, other=0.0)
                out += tl.load(skip_ptr + head) * skipped.to(tl.float32)
            at_out = token[:, None] * (HEADS * VALUE_DIM) + at_value
            tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=of_value)
            turned = tl.trans(key.to(dtype))
            before = (begin + chunk * CHUNK - first).to(tl.int64)  # the chunk's first token, if it is in the step
            keys = raw_keys_ptr + before * raw_key_stride + key_head * KEY_DIM
            sums = sums_ptr + before * (HEADS * KEY_DIM) + head * KEY_DIM
            # fmt: off
            _leave_states(
                cache_ptr + 1 + place, cache_stride, table, matrix, turned, value, logs, keys, sums,
                raw_key_stride, lanes, in_matrix, position, first, context, KEY_DIM, HEADS * KEY_DIM, CHANNELS,
                BLOCK_SIZE, ROLLBACK, CHUNK, ENTRIES, PRECISION,
            )
            # fmt: on
            if CHANNELS:
                last = tl.minimum(context - 1 - chunk * CHUNK, CHUNK - 1)
                until = tl.load(sums + last * (HEADS * KEY_DIM) + lanes, mask=is_key, other=0.0)
                matrix = matrix * tl.exp(until)[:, None]
                matrix += tl.dot(turned, value.to(dtype), input_precision=PRECISION)
            else:
                kept = tl.sum(logs, axis=0)
                scaled = (value * tl.exp(kept - total)[:, None]).to(dtype)
                matrix = matrix * tl.exp(kept) + tl.dot(turned, scaled, input_precision=PRECISION)


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
    return _recur(delta_inputs(qkv, decay, strength, a, dt_bias, shape, floor), cache, places, shape, qkv.dtype)


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
    return _recur(space_inputs(xbc, dt, dt_bias, a, skip, dt_limits, shape), cache, places, shape, xbc.dtype)


def linear_attention(qkv: Tensor, decay: Tensor, cache: Tensor, places: Any, shape: Any) -> Tensor:
    return _recur(linear_inputs(qkv, decay, shape), cache, places, shape, qkv.dtype)


def _within_chunks(
    inputs: Inputs, scores: Tensor, places: Any, shape: Any, sizes: dict[str, Any], of_values: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill scores; (queries and keys for the way through chunks, W, U, sums of log decays if they are of channels).

    Without the delta rule there are none of these.
    """
    queries, keys, values, decays, strengths, _ = inputs
    count, heads = scores.shape[:2]
    of_chunks = {"SLOT": SLOT, "ROWS": _ROWS, **sizes}
    values_block = max(16, triton.next_power_of_2(shape.value_dim))
    of_delta = {"VALUES": values_block, "LEVELS": CHUNK.bit_length() - 1, **of_values}
    # Triton 3.6 on Hopper: four warps get wrong numbers for W and U where these are narrower than the inverse.
    of_delta["num_warps"] = 4 if min(sizes["KEYS"], values_block) >= CHUNK else 8
    rounded = w = u = scores
    if strengths is not None:
        w = torch.empty(count, heads, shape.key_dim, dtype=scores.dtype, device=scores.device)
        u = torch.empty(count, heads * shape.value_dim, dtype=scores.dtype, device=scores.device)
        rounded = torch.empty(count, 2 * shape.num_key_heads, shape.key_dim, dtype=scores.dtype, device=scores.device)
    if strengths is not None and shape.decay_dim > 1:
        given = (queries, keys, values, decays, strengths)
        return rounded, w, u, channel_parts(*given, scores, rounded, w, u, places, of_chunks, of_delta)
    _within_chunks_kernel[(count // SLOT, heads)](
        queries,
        keys,
        values,
        decays,
        decays if strengths is None else strengths,
        places.contexts,
        places.starts,
        scores,
        rounded,
        w,
        u,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        places.rows.shape[0],
        KEY_HEADS=shape.num_key_heads,
        DELTA=strengths is not None,
        LEAST=LEAST_LOG,
        **of_chunks,
        **of_delta,
        **launch_options(),
    )
    return rounded, w, u, decays


def _recur(inputs: Inputs, cache: Tensor, places: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    count, num_rows, heads = inputs.values.shape[0], places.rows.shape[0], shape.num_heads
    channels = shape.decay_dim > 1
    if not places.has_long or count <= STATE_SHORT or (channels and shape.num_key_heads < heads):
        # Many programs want whole matrices, few of them more programs.
        return recur(inputs, cache, places, shape, dtype, (128, 4) if num_rows >= _SOME_ROWS else (32, 8))
    out = fold_tokens(inputs, cache, places, shape, dtype, STATE_SHORT)
    queries, keys, values, decays, strengths, skip = inputs
    delta = strengths is not None
    scores = torch.empty(count, heads, CHUNK, dtype=dtype, device=values.device)
    shared = {"HEADS": heads, "KEY_DIM": shape.key_dim, "SHORT": STATE_SHORT, "CHUNK": CHUNK}
    shared["KEYS"] = max(16, triton.next_power_of_2(shape.key_dim))
    of_values = {"VALUE_DIM": shape.value_dim, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
    rounded, w, u, sums = _within_chunks(inputs, scores, places, shape, shared, of_values)
    raw = keys
    if delta:
        queries, keys, values = rounded[:, : shape.num_key_heads], rounded[:, shape.num_key_heads :], u
    factors, skipped = skip or (values, values)
    columns = 32 if shape.value_dim > 64 else 16
    piece = dtype.itemsize * CHUNK * (3 * shared["KEYS"] + CHUNK) + 4 * CHUNK * columns
    _across_chunks_kernel[(num_rows, heads, triton.cdiv(shape.value_dim, columns))](
        queries,
        keys,
        values,
        decays,
        scores,
        w,
        raw,
        sums,
        factors,
        skipped,
        cache[:, shape.conv_size :],
        places.tables,
        places.rows,
        places.contexts,
        places.starts,
        out,
        queries.stride(0),
        keys.stride(0),
        raw.stride(0),
        values.stride(0),
        skipped.stride(0),
        cache.stride(0),
        places.tables.stride(0),
        BLOCK_SIZE=places.block_size,
        KEY_HEADS=shape.num_key_heads,
        ROLLBACK=shape.rollback,
        DELTA=delta,
        CHANNELS=channels,
        HAS_SKIP=skip is not None,
        COLUMNS=columns,
        ENTRIES=triton.next_power_of_2((CHUNK + shape.rollback) // places.block_size + 2),
        LEAST=LEAST_LOG,
        num_stages=stages_within(2, piece),
        **shared,
        **of_values,
        **launch_options(),
    )
    keep_inputs(inputs, cache, places, shape)
    return out
