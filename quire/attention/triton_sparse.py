"""Sparse latent attention with Triton kernels: each token attends to the keys that an indexer selects.

To attention a token is then a row of its own, with blocks of one key each, in the order of their positions: a context
no longer than top-k gives the bits of dense attention.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, AttentionSpec, Rotation, Written
from quire.attention.latent import IndexInputs, LatentWeights
from quire.attention.triton import TritonMetadata
from quire.attention.triton_latent import FixedTritonLatentAttention, TritonLatentAttention
from quire.kernels.triton.index import MOST_SCORES, prepare_index, select_rows
from quire.kernels.triton.latent import per_head
from quire.kernels.triton.latent_attention import LatentCut, latent_attention

_MANY_TOKENS = 64  # whose keys are not shared by several programs


class TritonSparseAttention(TritonLatentAttention):
    fused_queries = 1 << 30  # never: the unabsorbed form is dense

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        return 4 * max(MOST_SCORES, max_model_len)  # of a launch

    def write_index(
        self, spec: AttentionSpec, index: IndexInputs, rotation: Rotation, cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(metadata, TritonMetadata)
        assert rotation is not None, "latent attention rotates"
        return prepare_index(*index, rotation, metadata.batch.slot_mapping, cache[..., spec.head_dim :])

    def attend_latent(
        self,
        spec: AttentionSpec,
        weights: LatentWeights,
        written: Written,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, TritonMetadata)
        assert spec.value_dim is not None
        assert spec.top_k is not None
        assert written.of_index is not None
        batch, query = metadata.batch, written.query
        if batch.max_context <= spec.top_k:
            return super().attend_latent(spec, weights, written, cache, metadata)
        lists = (batch.tables, batch.rows, batch.contexts, batch.query_starts)
        keys = cache[..., spec.head_dim :]
        found = select_rows(*written.of_index, keys, *lists, spec.top_k, batch.max_context)
        count = query.shape[0]
        out = torch.empty(count, spec.num_heads, spec.value_dim, dtype=query.dtype, device=query.device)
        rows = (found.slots, found.lines, found.counts, found.firsts, found.firsts[:count], found.zeros)
        cut = self.sparse_cut(spec, metadata, count)
        latent_attention(query, cache.view(-1, 1, cache.shape[-1]), *rows, out, spec.scale, cut)
        return per_head(out, weights.value_up, self.tokens_at_once(count)).flatten(1)

    def sparse_cut(self, spec: AttentionSpec, metadata: TritonMetadata, count: int) -> LatentCut:
        """How `count` tokens with top-k keys each are split into programs."""
        assert spec.top_k is not None
        splits = 1 if count > _MANY_TOKENS else self._splits(spec, count, spec.top_k)
        return LatentCut(1, 0 if splits == 1 else splits, keys=self.keys_at_a_time)


class FixedTritonSparseAttention(TritonSparseAttention, FixedTritonLatentAttention):
    """Segments of keys are as long as in dense attention."""

    def sparse_cut(self, spec: AttentionSpec, metadata: TritonMetadata, count: int) -> LatentCut:
        assert spec.top_k is not None
        dense = self.cut(spec, metadata, 1, count)
        segments = min(dense.num_segments, -(-spec.top_k // dense.segment))
        splits = 0 if count > _MANY_TOKENS else min(dense.splits, segments)
        return replace(dense, splits=splits, num_segments=segments)
