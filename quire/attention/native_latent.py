"""Latent attention through the native CPU library, for prefill and decode alike: the absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, AttentionSpec, Rotation, Written
from quire.attention.cpu_native import KV_TYPES, SCALE_BYTES, NativeAttention, NativeMetadata
from quire.attention.latent import LatentBackend, LatentWeights
from quire.kernels.cpu import library
from quire.kernels.cpu.latent import per_head, per_head_into
from quire.kernels.cpu.tracing import empty


class NativeLatentAttention(LatentBackend, NativeAttention):
    num_scales = 1  # at the end of an int8 line

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        scales = self.num_scales * SCALE_BYTES if dtype == torch.int8 else 0
        return (num_blocks, block_size // self._share.size, head_dim + scales)

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        # A thread's unpacked tile and query rows, and the tiles' results of one long decode.
        assert spec.value_dim is not None
        return library.num_threads() * (2 << 20) + max_model_len * spec.num_heads * (spec.value_dim + 2) // 16

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        if cache.dtype != torch.int8:
            return super().heal(cache, block_ids)
        lines, first = cache[block_ids], -self.num_scales * SCALE_BYTES
        scales = lines[..., first:].contiguous().view(torch.float32)
        lines[..., first:] = scales.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(torch.int8)
        cache[block_ids] = lines
        return None

    def write_latent(
        self,
        spec: AttentionSpec,
        weights: LatentWeights,
        q: Tensor,
        latent: Tensor,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Written:
        assert isinstance(metadata, NativeMetadata)
        tokens, heads, _ = q.shape
        rank, nope = weights.norm.shape[0], weights.key_up.shape[1]
        query = empty(tokens, heads, spec.head_dim)
        per_head_into(q[..., :nope], weights.key_up, query)
        cos, sin = (None, None) if rotation is None else (part.data_ptr() for part in rotation)
        self._kernels.prepare_latent(
            q.data_ptr(),
            q.stride(0),
            latent.data_ptr(),
            latent.stride(0),
            weights.norm.data_ptr(),
            cos,
            sin,
            metadata.slots,
            query.data_ptr(),
            cache.data_ptr(),
            tokens,
            metadata.batch.num_tokens,
            heads,
            nope,
            spec.head_dim - rank,
            rank,
            metadata.batch.block_size,
            cache.stride(1) * cache.element_size(),
            KV_TYPES[cache.dtype],
            weights.eps,
        )
        return Written(query)

    def attend_latent(
        self,
        spec: AttentionSpec,
        weights: LatentWeights,
        written: Written,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, NativeMetadata)
        batch = metadata.batch
        rows = (metadata.tables, metadata.rows, metadata.contexts, metadata.starts)
        out = self._attended(
            spec, written.query, cache, rows, batch.rows.shape[0], batch.tables.stride(0), batch.block_size
        )
        if written.query.shape[0] > batch.num_tokens:
            out[batch.num_tokens :] = 0.0
        return per_head(out, weights.value_up).flatten(1)

    def _attended(
        self,
        spec: AttentionSpec,
        query: Tensor,
        cache: Tensor,
        rows: tuple[int, ...],
        num_rows: int,
        table_stride: int,
        block_size: int,
    ) -> Tensor:
        """Sums of latents [n, heads, value_dim]; rows: addresses of tables, lines in them, contexts and starts."""
        assert spec.value_dim is not None
        share, out = self._share, self._room(query, spec.value_dim)
        query = self._all_queries(query)
        self._kernels.latent_attention(
            query.data_ptr(),
            cache.data_ptr(),
            *rows,
            out.data_ptr(),
            num_rows,
            table_stride,
            cache.stride(1) * cache.element_size(),
            share.size * spec.num_heads,
            spec.head_dim,
            spec.value_dim,
            block_size,
            KV_TYPES[cache.dtype],
            spec.scale,
            share.size,
            share.rank,
        )
        return self._merged(out, spec.num_heads, spec.value_dim, None)
