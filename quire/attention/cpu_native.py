"""Paged attention through the native CPU library: one call per layer for prefill and decode alike.

Arithmetic is float32; the cache may hold less. A query's keys are summed in tiles at absolute positions, so nothing
about the batch can change a bit.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionSpec,
    HeadNorm,
    Rotation,
    Written,
)
from quire.kernels.cpu import library
from quire.kernels.cpu.recording import KernelRecorder
from quire.kernels.cpu.tracing import empty
from quire.platform.recording import SizedRecorder

# As kv_cache.h numbers them. The default first: half the memory traffic of float32, and an error of 2^-11 at most.
KV_TYPES = {torch.float16: 1, torch.float32: 0, torch.bfloat16: 2, torch.int8: 3}
SCALE_BYTES = 4  # beside each head's int8 key or value


@dataclass(slots=True)
class NativeMetadata(AttentionMetadata):
    """Addresses that are the same in every layer of a step; `batch` keeps their tensors alive."""

    batch: AttentionBatch
    slots: int
    tables: int
    rows: int
    contexts: int
    starts: int


class NativeAttention(AttentionBackend):
    name = "cpu_native"

    def __init__(self) -> None:
        self._kernels = library.bound()

    @property
    def instruction_set(self) -> str:
        found = library.load()
        return "" if found is None else found.instruction_set

    @classmethod
    def refuses(cls, dtype: torch.dtype) -> str | None:
        return f"takes no {dtype}" if dtype != torch.float32 else library.unavailable()

    def start(self) -> None:
        library.take_threads()

    def recorder(self) -> SizedRecorder:
        return KernelRecorder()

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return tuple(KV_TYPES)

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        # Within a cell of the last two dimensions the library arranges keys in its own way (kv_cache.h).
        width = head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim
        return (2, num_blocks, num_kv_heads, block_size, width)

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        # A thread's unpacked tile and query rows, and the tiles' results of one long decode.
        return library.num_threads() * (1 << 20) + max_model_len * spec.num_heads * (spec.head_dim + 18) // 2

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        blocks = cache[:, block_ids]
        if cache.dtype == torch.int8:
            cells = blocks.flatten(-2)
            first = cells.shape[-1] - SCALE_BYTES * blocks.shape[-2]
            scales = cells[..., first:].contiguous().view(torch.float32)
            cells[..., first:] = scales.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(torch.int8)
            cache[:, block_ids] = cells.view(blocks.shape)
        else:
            cache[:, block_ids] = blocks.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def note_finite(self, values: Tensor, out: Tensor) -> None:
        self._kernels.note_finite(values.data_ptr(), *values.shape, values.stride(0), out.data_ptr())

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> NativeMetadata:
        return NativeMetadata(
            batch,
            batch.slot_mapping.data_ptr(),
            batch.tables.data_ptr(),
            batch.rows.data_ptr(),
            batch.contexts.data_ptr(),
            batch.query_starts.data_ptr(),
        )

    def write(
        self,
        spec: AttentionSpec,
        qkv: Tensor,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Written:
        assert isinstance(metadata, NativeMetadata)
        qkv = qkv.contiguous()
        tokens = qkv.shape[0]
        q = empty(tokens, spec.num_heads, spec.head_dim)
        q_weight = k_weight = cos = sin = None
        eps = offset = 0.0
        rotary = 0
        if head_norm is not None:
            q_weight, k_weight = head_norm.q_weight.data_ptr(), head_norm.k_weight.data_ptr()
            eps, offset = head_norm.eps, head_norm.weight_offset
        if rotation is not None:
            cos, sin, rotary = rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].shape[-1]
        self._kernels.prepare_qkv(
            qkv.data_ptr(),
            q_weight,
            k_weight,
            cos,
            sin,
            metadata.slots,
            q.data_ptr(),
            cache.data_ptr(),
            tokens,
            metadata.batch.num_tokens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            rotary,
            metadata.batch.block_size,
            cache.stride(0) * cache.element_size(),
            KV_TYPES[cache.dtype],
            eps,
            offset,
            int(spec.norms_rotated),
        )
        return Written(q)

    def attend(self, spec: AttentionSpec, written: Written, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert isinstance(metadata, NativeMetadata)
        batch, query = metadata.batch, written.query
        out = empty(query.shape[0], spec.num_heads * spec.head_dim)
        if query.shape[0] > metadata.batch.num_tokens:
            out[metadata.batch.num_tokens :] = 0.0
        self._kernels.attention(
            query.data_ptr(),
            cache.data_ptr(),
            metadata.tables,
            metadata.rows,
            metadata.contexts,
            metadata.starts,
            out.data_ptr(),
            batch.rows.shape[0],
            batch.tables.stride(0),
            cache.stride(0) * cache.element_size(),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            batch.block_size,
            spec.kernel_window,
            int(spec.causal),
            KV_TYPES[cache.dtype],
            spec.scale,
            spec.soft_cap or 0.0,
            None if spec.sinks is None else spec.sinks.data_ptr(),
        )
        return out
