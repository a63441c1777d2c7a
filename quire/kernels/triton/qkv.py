"""From projected qkv to attention's inputs in one pass: per-head norm, rotation, and the write into the KV cache.

The cache is [2, num_blocks, num_kv_heads, block_size, head_dim]: keys, then values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options


@triton.jit
def _added_up(ptr, at, mask, part_stride, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Features of a matmul that may be in parts, rounded as if it had been whole."""
    x = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x += tl.load(ptr + part * part_stride + at, mask=mask, other=0.0)
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def _head_weights(q_weight_ptr, k_weight_ptr, dims, in_head, is_query, weight_offset):
    """What the features `dims` of normed heads are multiplied by; float32."""
    q_weight = tl.load(q_weight_ptr + dims, mask=in_head, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dims, mask=in_head, other=0.0).to(tl.float32)
    return tl.where(is_query, q_weight[None, :], k_weight[None, :]) + weight_offset


@triton.jit
def _write(
    x, token, heads, dims, in_head, slot, q_out_ptr, k_out_ptr, cache_ptr, value_offset, key_scale, value_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEEP_KEYS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Put x, the features `dims` of some heads of a token, where queries, keys and values go."""
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_head[None, :]
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    q_at = (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(q_out_ptr + q_at, x.to(q_out_ptr.dtype.element_ty), mask=inside & is_query)
    kv_head = tl.where(heads < NUM_HEADS + NUM_KV_HEADS, heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS)[:, None]
    if KEEP_KEYS:
        k_at = (token * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        tl.store(k_out_ptr + k_at, x.to(k_out_ptr.dtype.element_ty), mask=inside & ~is_query & ~is_value)
    cell = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    at = cell * HEAD_DIM + dims[None, :] + tl.where(is_value, value_offset, 0)
    # Padding is not written: the null block stays zero, as what stands in for keys that nobody may see.
    if slot >= BLOCK_SIZE:
        if SCALED:
            x = tl.div_rn(x, tl.where(is_value, value_scale, key_scale) + tl.zeros_like(x))
            x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))  # NaN is kept
        tl.store(cache_ptr + at, x.to(cache_ptr.dtype.element_ty), mask=inside & ~is_query)


@triton.jit
def _qkv_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_out_ptr,
    k_out_ptr,
    cache_ptr,
    qkv_stride,
    part_stride,
    value_offset,  # elements from the keys to the values of the cache
    eps,
    weight_offset,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # 0: nothing is rotated
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,  # of query and key heads: "first", before the rotation, "last", after it, or ""
    KEEP_KEYS: tl.constexpr,  # also write the keys to k_out [n, kv_heads, dim]
    SCALED: tl.constexpr,  # what goes to the cache is divided by its scale
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,  # of qkv, to be added up
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_head[None, :]
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    base = token * qkv_stride + heads[:, None] * HEAD_DIM
    x = _added_up(qkv_ptr, base + dims[None, :], inside, part_stride, PARTS, q_out_ptr.dtype.element_ty)
    raw = x
    if NORM == "first":
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        weight = _head_weights(q_weight_ptr, k_weight_ptr, dims, in_head, is_query, weight_offset)
        x = x * scale[:, None] * weight
    if ROTARY_DIM > 0:
        rotates = dims < ROTARY_DIM
        partner = tl.where(rotates, (dims + ROTARY_DIM // 2) % ROTARY_DIM, dims)
        other = _added_up(qkv_ptr, base + partner[None, :], inside, part_stride, PARTS, q_out_ptr.dtype.element_ty)
        if NORM == "first":
            weight = _head_weights(q_weight_ptr, k_weight_ptr, partner, in_head, is_query, weight_offset)
            other = other * scale[:, None] * weight
        cos = tl.load(cos_ptr + token * ROTARY_DIM + dims, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * ROTARY_DIM + dims, mask=rotates, other=0.0).to(tl.float32)
        x = x * cos[None, :] + other * sin[None, :]
    if NORM == "last":
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        weight = _head_weights(q_weight_ptr, k_weight_ptr, dims, in_head, is_query, weight_offset)
        x = x * scale[:, None] * weight
    x = tl.where(is_value, raw, x)
    slot = tl.load(slots_ptr + token)
    _write(
        x, token, heads, dims, in_head, slot, q_out_ptr, k_out_ptr, cache_ptr, value_offset,
        key_scale, value_scale, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEEP_KEYS, SCALED,
    )  # fmt: skip


@triton.jit
def _halves_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_out_ptr,
    k_out_ptr,
    cache_ptr,
    qkv_stride,
    part_stride,
    value_offset,
    eps,
    weight_offset,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same where all of a head is rotated: its halves are each other's partners, so each is loaded once."""
    begin_dependent(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    low = tl.arange(0, HALF)
    in_half = low < HALF
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    at = token * qkv_stride + heads[:, None] * HEAD_DIM + low[None, :]
    raw_x = _added_up(qkv_ptr, at, inside, part_stride, PARTS, q_out_ptr.dtype.element_ty)
    raw_y = _added_up(qkv_ptr, at + HALF, inside, part_stride, PARTS, q_out_ptr.dtype.element_ty)
    x, y = raw_x, raw_y
    if NORM != "":
        low_weight = _head_weights(q_weight_ptr, k_weight_ptr, low, in_half, is_query, weight_offset)
        high_weight = _head_weights(q_weight_ptr, k_weight_ptr, HALF + low, in_half, is_query, weight_offset)
    if NORM == "first":
        scale = 1.0 / tl.sqrt(tl.sum(x * x + y * y, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * low_weight
        y = y * scale * high_weight
    angles = token * HEAD_DIM + low
    cos_x, sin_x = tl.load(cos_ptr + angles).to(tl.float32), tl.load(sin_ptr + angles).to(tl.float32)
    cos_y, sin_y = tl.load(cos_ptr + angles + HALF).to(tl.float32), tl.load(sin_ptr + angles + HALF).to(tl.float32)
    turned_x = x * cos_x[None, :] + y * sin_x[None, :]
    turned_y = y * cos_y[None, :] + x * sin_y[None, :]
    if NORM == "last":
        scale = 1.0 / tl.sqrt(tl.sum(turned_x * turned_x + turned_y * turned_y, axis=1) / HEAD_DIM + eps)[:, None]
        turned_x = turned_x * scale * low_weight
        turned_y = turned_y * scale * high_weight
    turned_x = tl.where(is_value, raw_x, turned_x)
    turned_y = tl.where(is_value, raw_y, turned_y)
    slot = tl.load(slots_ptr + token)
    _write(
        turned_x, token, heads, low, in_half, slot, q_out_ptr, k_out_ptr, cache_ptr, value_offset,
        key_scale, value_scale, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEEP_KEYS, SCALED,
    )  # fmt: skip
    _write(
        turned_y, token, heads, low + HALF, in_half, slot, q_out_ptr, k_out_ptr, cache_ptr, value_offset,
        key_scale, value_scale, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEEP_KEYS, SCALED,
    )  # fmt: skip


def prepare_qkv(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    cache: Tensor,
    num_heads: int,
    dtype: torch.dtype,
    k_out: Tensor | None = None,
    heads_per_program: int | None = None,
    norms_rotated: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """qkv [n, (heads + 2 * kv_heads) * dim] -> q [n, heads, dim] in `dtype`; keys and values go to cache[:, slot].

    Slots in the null block are those of padding: nothing is written there. qkv may also be [parts, n, ...], to be
    added up. `k_out` [n, kv_heads, dim] receives the keys too. `norms_rotated`: heads are normed after the rotation.
    The cache gets keys divided by key_scale, and values by value_scale.

    rotation: cos and sign-folded sin, each [n, 1, rotary_dim]; slots: [n] int64.
    """
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    tokens = qkv.shape[-2]
    q = torch.empty(tokens, num_heads, head_dim, dtype=dtype, device=qkv.device)
    total = num_heads + 2 * num_kv_heads
    # The more tokens, the more heads a program has: parallelism against the cost of launching. Measured on an H200.
    heads = heads_per_program or (4 if tokens <= 64 else 8 if tokens <= 192 else 32)
    cos, sin = (qkv, qkv) if rotation is None else rotation
    rotary_dim = 0 if rotation is None else cos.shape[-1]
    given = (
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        cos,
        sin,
        slots,
        q,
        q if k_out is None else k_out,
        cache,
        qkv.stride(-2),
        qkv.stride(0),
        cache.stride(0),
        eps,
        weight_offset,
        key_scale,
        value_scale,
    )
    shape: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "NORM": "" if q_weight is None else "last" if norms_rotated else "first",
        "KEEP_KEYS": k_out is not None,
        "SCALED": (key_scale, value_scale) != (1.0, 1.0),
        "HEADS": heads,
        "PARTS": qkv.shape[0] if qkv.dim() == 3 else 1,
        "num_warps": 4,
        **launch_options(),
    }
    grid = (tokens, triton.cdiv(total, heads))
    dim = triton.next_power_of_2(head_dim)
    if rotary_dim == dim:
        _halves_kernel[grid](*given, **shape)
    else:
        _qkv_kernel[grid](*given, ROTARY_DIM=rotary_dim, DIM=dim, **shape)
    return q
