"""Latent attention through the native CPU library, dense and sparse, for prefill and decode: the absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, LayerCache, Rotation, Written
from quire.attention.cpu_native import SCALE_BYTES, NativeAttention, NativeMetadata, rotation_addresses
from quire.attention.latent import IndexInputs, LatentBackend, LatentWeights
from quire.kernels.cpu import library
from quire.kernels.cpu.index import KV_TYPES, select_rows
from quire.kernels.cpu.latent import per_head, per_head_into
from quire.kernels.cpu.tracing import empty
from quire.parallel.groups import ContextShare


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
        self, at: LayerCache, weights: LatentWeights, q: Tensor, latent: Tensor, rotation: Rotation
    ) -> Written:
        spec, cache, metadata = at
        assert isinstance(metadata, NativeMetadata)
        tokens, heads, _ = q.shape
        rank = weights.norm.shape[0]
        nope = q.shape[2] - (spec.head_dim - rank)
        query = empty(tokens, heads, spec.head_dim)
        per_head_into(q[..., :nope], weights.key_up, query)
        given = (q.data_ptr(), q.stride(0), latent.data_ptr(), latent.stride(0), weights.norm.data_ptr())
        to = (metadata.slots, query.data_ptr(), cache.data_ptr())
        sizes = (tokens, metadata.batch.num_tokens, heads, nope, spec.head_dim - rank, rank)
        kept = (metadata.batch.block_size, cache.stride(1) * cache.element_size(), KV_TYPES[cache.dtype])
        self._kernels.prepare_latent(*given, *rotation_addresses(rotation), *to, *sizes, *kept, weights.eps)
        return Written(query)

    def attend_latent(self, at: LayerCache, weights: LatentWeights, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, NativeMetadata)
        batch = metadata.batch
        rows = metadata.rows_of_step
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
        strides = (num_rows, table_stride, cache.stride(1) * cache.element_size())
        sizes = (share.size * spec.num_heads, spec.head_dim, spec.value_dim, block_size, KV_TYPES[cache.dtype])
        given = (query.data_ptr(), cache.data_ptr(), *rows, out.data_ptr())
        self._kernels.latent_attention(*given, *strides, *sizes, spec.scale, share.size, share.rank)
        return self._merged(out, spec.num_heads, spec.value_dim, None)


class NativeSparseAttention(NativeLatentAttention):
    """Each token attends to the keys that an indexer selects.

    To attention a token is then a row of its own, with blocks of one key each, in the order of their positions: a
    context no longer than top-k gives the bits of dense attention.
    """

    num_scales = 2  # of the index key, then of the latent

    def share_context(self, share: ContextShare) -> None:
        AttentionBackend.share_context(self, share)  # an indexer selects among the keys of all tokens

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        # And scores of twice as many tokens as there are threads, for all keys.
        return super().workspace_bytes(spec, max_model_len, itemsize) + 8 * library.num_threads() * max_model_len

    def write_index(self, at: LayerCache, index: IndexInputs, rotation: Rotation) -> tuple[Tensor, Tensor]:
        spec, cache, metadata = at
        assert isinstance(metadata, NativeMetadata)
        tokens, heads, dim = index.query.shape
        query, weights, keys = empty(tokens, heads, dim), empty(tokens, heads), _keys(spec, cache)
        given = (part for each in index for part in (each.data_ptr(), each.stride(0)))
        to = (metadata.slots, query.data_ptr(), weights.data_ptr(), keys.data_ptr())
        rotary = 0 if rotation is None else rotation[0].shape[-1]
        sizes = (tokens, metadata.batch.num_tokens, heads, dim, rotary)
        kept = (keys.stride(1) * keys.element_size(), keys.shape[2] * keys.element_size(), KV_TYPES[cache.dtype])
        self._kernels.prepare_index(*given, *rotation_addresses(rotation), *to, *sizes, *kept)
        return query, weights

    def attend_latent(self, at: LayerCache, weights: LatentWeights, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, NativeMetadata)
        batch = metadata.batch
        if spec.top_k is None or batch.max_context <= spec.top_k:
            return super().attend_latent(at, weights, written)
        if written.of_index is not None:
            lists = (batch.tables, batch.rows, batch.contexts, batch.query_starts)
            metadata.choice = select_rows(*written.of_index, _keys(spec, cache), *lists, spec.top_k)
        assert metadata.choice is not None, "a layer before has an indexer"
        slots, counts, lines, firsts = metadata.choice
        rows = tuple(part.data_ptr() for part in (slots, lines, counts, firsts))
        out = self._attended(spec, written.query, cache, rows, written.query.shape[0], spec.top_k, 1)
        return per_head(out, weights.value_up).flatten(1)


def _keys(spec: AttentionSpec, cache: Tensor) -> Tensor:
    """The index keys of a cache; those of 8 bits with their scales."""
    width = spec.line_width(cache.dtype) + (SCALE_BYTES if cache.dtype == torch.int8 else 0)
    return cache[..., spec.head_dim : width]
