"""Paged attention through the native CPU library: float32, one call per layer for prefill and decode alike.

A query's keys are summed in order of position, so nothing about the batch can change a bit.
"""

from __future__ import annotations

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
)
from quire.kernels.cpu import library


@dataclass(slots=True)
class NativeMetadata(AttentionMetadata):
    batch: AttentionBatch
    num_tokens: int  # without padding


class NativeAttention(AttentionBackend):
    name = "cpu_native"

    @classmethod
    def refuses(cls, dtype: torch.dtype) -> str | None:
        return f"takes no {dtype}" if dtype != torch.float32 else library.unavailable()

    def cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        return torch.get_num_threads() * max_model_len * itemsize

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        cache[:, block_ids] = cache[:, block_ids].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def prepare(self, batch: AttentionBatch) -> NativeMetadata:
        return NativeMetadata(batch, sum(batch.query_lens))

    def write(
        self,
        spec: AttentionSpec,
        qkv: Tensor,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, NativeMetadata)
        qkv = qkv.contiguous()
        tokens = qkv.shape[0]
        q = torch.empty(tokens, spec.num_heads, spec.head_dim)
        q_weight, k_weight, eps, offset = head_norm or (None, None, 0.0, 0.0)
        cos, sin = rotation or (None, None)
        library.bound().prepare_qkv(
            qkv.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            metadata.batch.slot_mapping.data_ptr(),
            q.data_ptr(),
            cache.data_ptr(),
            tokens,
            metadata.num_tokens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            0 if cos is None else cos.shape[-1],
            metadata.batch.block_size,
            cache.stride(0),
            eps,
            offset,
        )
        return q

    def attend(self, spec: AttentionSpec, query: Tensor, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert isinstance(metadata, NativeMetadata)
        batch = metadata.batch
        out = torch.empty(query.shape[0], spec.num_heads * spec.head_dim)
        if query.shape[0] > metadata.num_tokens:
            out[metadata.num_tokens :] = 0.0
        library.bound().attention(
            query.data_ptr(),
            cache.data_ptr(),
            batch.tables.data_ptr(),
            batch.rows.data_ptr(),
            batch.contexts.data_ptr(),
            batch.query_starts.data_ptr(),
            out.data_ptr(),
            len(batch.query_lens),
            batch.tables.stride(0),
            cache.stride(0),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            batch.block_size,
            spec.sliding_window or 0,
            spec.scale,
            spec.soft_cap or 0.0,
        )
        return out
