"""Latent attention with Triton kernels, dense and sparse: absorbed, and for long prompts in one step unabsorbed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, LayerCache, Rotation, Written
from quire.attention.latent import IndexInputs, LatentBackend, LatentWeights
from quire.attention.triton import FEW_QUERIES, MAX_FEW_ROWS, TritonAttention, TritonMetadata, fused_attention
from quire.attention.triton_fixed import FixedTritonAttention, segment_size
from quire.kernels.triton.index import MOST_SCORES, SelectedKeys, prepare_index, select_rows
from quire.kernels.triton.latent import FIXED_TOKENS, folded_up, folds, per_head, prepare_latent, tokens_at_once
from quire.kernels.triton.latent_attention import MAX_HEADS, LatentCut, latent_attention
from quire.kernels.triton.prefill_attention import QUERY_TILE

_MAX_SPLITS = 32


class TritonLatentAttention(LatentBackend, TritonAttention):
    max_head_dim = None
    shares = False  # all rows are cut alike
    splits_tiles = False
    fused_queries = 1024  # with at least this many the unabsorbed form is faster
    tile_lines = 64  # queries times heads of a program, in prompts
    keys_at_a_time = 32

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        # Queries, keys and values of all heads of a prompt in the unabsorbed form.
        return max_model_len * spec.num_heads * spec.head_dim * itemsize

    def parts_bytes(self, spec: AttentionSpec, max_rows: int, max_model_len: int) -> int:
        assert spec.value_dim is not None
        singles = max(rows * self._splits(spec, rows, max_model_len) for rows in (1, 16, 64, max_rows))
        few = MAX_FEW_ROWS * FEW_QUERIES * self._splits(spec, FEW_QUERIES, max_model_len)
        return max(few, singles) * spec.num_heads * (spec.value_dim + 2) * 4

    def write_latent(
        self, at: LayerCache, weights: LatentWeights, q: Tensor, latent: Tensor, rotation: Rotation
    ) -> Written:
        _, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        kept = torch.empty(latent.shape, dtype=q.dtype, device=q.device) if metadata.whole else None
        given = (weights.norm, weights.eps, weights.key_up, rotation, metadata.batch.slot_mapping, cache)
        query = prepare_latent(q, latent, *given, self.tokens_at_once(q.shape[0]), kept=kept)
        return Written(query, kept, None if kept is None else q)  # of which `_unabsorbed` makes keys and values

    def attend_latent(self, at: LayerCache, weights: LatentWeights, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        assert spec.value_dim is not None
        batch, query = metadata.batch, written.query
        whole, tiles = ((), metadata.tiles) if written.keys is None else (metadata.whole, metadata.partial_tiles)
        if whole == ((0, query.shape[0]),):
            return _unabsorbed(spec, weights, written, slice(0, query.shape[0]))
        out = torch.empty(query.shape[0], spec.num_heads, spec.value_dim, dtype=query.dtype, device=query.device)
        given = (query, cache, batch.tables, batch.rows, batch.contexts, batch.query_starts)
        index = metadata.singles[0]
        if index.shape[0]:
            if metadata.offsets is None:
                metadata.offsets = torch.zeros_like(index)
            cut = self.cut(spec, metadata, 1, index.shape[0])
            others = metadata.few[0].shape[0] + metadata.tiles[0].shape[0]
            folded = others > 0 or not folds(index.shape[0])
            parts = latent_attention(*given, index, metadata.offsets, out, spec.scale, cut, folded=folded)
            if parts is not None:
                rows = (batch.contexts, batch.query_starts, index)
                return folded_up(parts, *rows, weights.value_up, query.shape[0]).flatten(1)
        if metadata.few[0].shape[0]:
            cut = self.cut(spec, metadata, FEW_QUERIES, metadata.few[0].shape[0])
            latent_attention(*given, *metadata.few, out, spec.scale, cut)
        if tiles[0].shape[0]:
            cut = replace(self.cut(spec, metadata, QUERY_TILE, 0), splits=0)
            latent_attention(*given, *tiles, out, spec.scale, cut)
        found = per_head(out, weights.value_up, self.tokens_at_once(out.shape[0])).flatten(1)
        for start, length in whole:
            found[start : start + length] = _unabsorbed(spec, weights, written, slice(start, start + length))
        return found

    def tokens_at_once(self, num_tokens: int) -> int:
        return tokens_at_once(num_tokens)

    def cut(self, spec: AttentionSpec, metadata: TritonMetadata, tile: int, count: int) -> LatentCut:
        """How `count` tiles with this number of queries are split into programs."""
        if tile == QUERY_TILE:
            return LatentCut(tile, 0, lines=self.tile_lines, keys=self.keys_at_a_time)
        splits = self._splits(spec, count * -(-tile // _tokens(spec)), metadata.batch.max_context)
        return LatentCut(tile, 0 if splits == 1 else splits, keys=self.keys_at_a_time)

    def _splits(self, spec: AttentionSpec, programs: int, max_context: int) -> int:
        """Programs that share a row's keys: as many as fill the device, with at least two pieces of keys each."""
        programs *= -(-spec.num_heads // MAX_HEADS)
        splits = 1
        while (
            splits < _MAX_SPLITS
            and programs * splits * 2 <= 2 * self.multiprocessors()
            and max_context > 2 * self.keys_at_a_time * splits
        ):
            splits *= 2
        return splits


class FixedTritonLatentAttention(TritonLatentAttention):
    """The absorbed form for all: segments of keys at fixed places."""

    name = "triton_fixed"
    fused_queries = 1 << 30  # never
    tile_lines = 32
    min_segment = FixedTritonAttention.min_segment

    def parts_bytes(self, spec: AttentionSpec, max_rows: int, max_model_len: int) -> int:
        assert spec.value_dim is not None
        queries = max(max_rows, MAX_FEW_ROWS * FEW_QUERIES)
        segments = -(-max_model_len // segment_size(self.min_segment, max_model_len)) + 1
        return queries * segments * spec.num_heads * (spec.value_dim + 2) * 4

    def tokens_at_once(self, num_tokens: int) -> int:
        return FIXED_TOKENS

    def cut(self, spec: AttentionSpec, metadata: TritonMetadata, tile: int, count: int) -> LatentCut:
        batch = metadata.batch
        max_len = batch.tables.shape[1] * batch.block_size
        segment = segment_size(self.min_segment, max_len - batch.block_size)  # without the spare block
        found = super().cut(spec, metadata, tile, count)
        segments = -(-max_len // segment)
        # Few queries always leave their segments in memory: with two sums in registers, one program is slower.
        splits = 0 if tile == QUERY_TILE else min(max(1, found.splits), segments)
        return replace(found, splits=splits, segment=segment, num_segments=segments)


def _tokens(spec: AttentionSpec) -> int:
    """Queries of a program of few lines."""
    return max(1, 16 // min(MAX_HEADS, spec.num_heads))


def _unabsorbed(spec: AttentionSpec, weights: LatentWeights, written: Written, span: slice) -> Tensor:
    """Causal attention of a prompt, whose tokens are those of `span`, over itself: keys and values of each head."""
    assert written.keys is not None
    assert written.values is not None
    query, kept, q = (part[span] for part in (written.query, written.keys, written.values))
    rank, nope, value_dim = weights.norm.shape[0], weights.key_up.shape[1], weights.value_up.shape[2]
    compressed = kept[:, :rank].expand(spec.num_heads, -1, -1)
    plain = torch.empty(2, spec.num_heads, *q.shape[::2], dtype=q.dtype, device=q.device)
    plain[0, ..., :nope].copy_(q[..., :nope].transpose(0, 1))
    plain[0, ..., nope:].copy_(query[..., rank:].transpose(0, 1))
    plain[1, ..., :nope].copy_(torch.bmm(compressed, weights.key_up.transpose(1, 2)))
    plain[1, ..., nope:].copy_(kept[:, rank:])
    # Fused kernels take heads of one size: what is added to values are zeros.
    values = torch.nn.functional.pad(torch.bmm(compressed, weights.value_up), (0, q.shape[2] - value_dim))
    out = fused_attention(plain[:1], plain[1:], values[None], spec.scale)
    return out[0, ..., :value_dim].transpose(0, 1).reshape(q.shape[0], -1)


_MANY_TOKENS = 64  # whose keys are not shared by several programs


class TritonSparseAttention(TritonLatentAttention):
    """Each token attends to the keys that an indexer selects, in rows as those of `NativeSparseAttention`."""

    fused_queries = 1 << 30  # never: the unabsorbed form is dense

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        return 4 * max(MOST_SCORES, max_model_len)  # of a launch

    def write_index(self, at: LayerCache, index: IndexInputs, rotation: Rotation) -> tuple[Tensor, Tensor]:
        spec, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        assert rotation is not None, "latent attention rotates"
        return prepare_index(*index, rotation, metadata.batch.slot_mapping, cache[..., spec.head_dim :])

    def attend_latent(self, at: LayerCache, weights: LatentWeights, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        assert spec.value_dim is not None
        batch, query = metadata.batch, written.query
        if spec.top_k is None or batch.max_context <= spec.top_k:  # None: of a drafter without an indexer
            return super().attend_latent(at, weights, written)
        if written.of_index is not None:
            lists = (batch.tables, batch.rows, batch.contexts, batch.query_starts)
            keys = cache[..., spec.head_dim :]
            metadata.choice = select_rows(*written.of_index, keys, *lists, spec.top_k, batch.max_context)
        assert metadata.choice is not None, "a layer before has an indexer"
        found, count = SelectedKeys(*metadata.choice), query.shape[0]
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
