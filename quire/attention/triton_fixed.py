"""Paged attention whose queries have the same bits whatever else is in the step: segments of keys at fixed places.

Long prompts without a cached prefix have a kernel of their own, with the same arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, LayerCache, Written
from quire.attention.triton import FEW_QUERIES, MAX_FEW_ROWS, TritonAttention, TritonMetadata, both_directions
from quire.kernels.triton.prefill_attention import QUERY_TILE
from quire.kernels.triton.tile_attention import Cut, tile_attention
from quire.kernels.triton.whole_attention import whole_attention, whole_fits

MAX_SEGMENTS = 64
_LEAST_SHARE = (2, 2)
_WIDE = 512  # bytes of a head of which a multiprocessor has no room for several pieces of keys and values


class FixedTritonAttention(TritonAttention):
    name = "triton_fixed"
    shares = False
    splits_tiles = False
    heads_per_program = 8  # for any number of tokens: the order of a norm's sum may depend on it
    min_segment = 512  # keys
    keys_at_a_time = 64
    most_few_rows = MAX_FEW_ROWS  # each takes room for all segments of its queries
    few_splits = 8  # programs that share the keys of a row of few queries
    # By rows times KV heads, at most: programs that share a row's segments, and their warps; measured on an H200.
    segment_shares: tuple[tuple[int, tuple[int, int]], ...] = ((32, (16, 4)), (256, (8, 4)), (1024, (4, 2)))
    attend_whole = staticmethod(whole_attention)

    def parts_bytes(self, spec: AttentionSpec, max_rows: int, max_model_len: int) -> int:
        queries = max(max_rows, MAX_FEW_ROWS * FEW_QUERIES)
        # One more, which the spare block may begin.
        segments = -(-max_model_len // segment_size(self.min_segment, max_model_len)) + 1
        return queries * segments * spec.num_heads * (spec.head_dim + 2) * 4

    def takes_whole(self, spec: AttentionSpec, qkv: Tensor, cache: Tensor) -> bool:
        # From a cache of another type, other steps read other values.
        is_same = cache.dtype == qkv.dtype and whole_fits(spec.head_dim, qkv.element_size())
        return is_same and super().takes_whole(spec, qkv, cache)

    def attend(self, at: LayerCache, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        batch, query = metadata.batch, written.query
        if not spec.causal and written.keys is not None:
            return both_directions(spec, written, batch, metadata.tiles)
        out = torch.empty(query.shape[0], spec.num_heads * spec.head_dim, dtype=query.dtype, device=query.device)
        given = (query, cache, batch.tables, batch.rows, batch.contexts, batch.query_starts)
        scale, cap, window = spec.scale * spec.kv_scales[0], spec.soft_cap, spec.kernel_window
        beside = spec.sinks, spec.kv_scales[1]
        max_len = batch.tables.shape[1] * batch.block_size
        segment = segment_size(self.min_segment, max_len - batch.block_size)  # without the spare block
        keys = self.keys_at_a_time
        whole = metadata.whole if written.keys is not None else ()
        for start, length in whole:
            assert written.keys is not None
            assert written.values is not None
            span = slice(start, start + length)
            given_whole = (query[span], written.keys[span], written.values[span], out[span])
            self.attend_whole(*given_whole, scale, segment, keys)
        if whole == ((0, query.shape[0]),):
            return out
        split = Cut(tile=1, splits=1, segment=segment, num_segments=-(-max_len // segment), lines=16, keys=keys)
        index = metadata.singles[0]
        if index.shape[0]:
            if metadata.offsets is None:
                metadata.offsets = torch.zeros_like(index)
            splits, warps = self.choose_share(index.shape[0] * spec.num_kv_heads)
            if spec.group_size > split.lines:
                warps = 4
            cut = replace(split, splits=splits, num_warps=warps)
            tile_attention(*given, index, metadata.offsets, out, scale, cap, window, cut, *beside)
        if metadata.few[0].shape[0]:
            cut = replace(split, tile=FEW_QUERIES, splits=self.few_splits)
            tile_attention(*given, *metadata.few, out, scale, cap, window, cut, *beside)
        tiles = metadata.partial_tiles if whole else metadata.tiles
        if tiles[0].shape[0]:
            stages = 1 if spec.head_dim * query.element_size() > _WIDE else 3
            lines, warps = 64, 8 if spec.head_dim > 128 else 4
            if cache.element_size() < query.element_size():
                # Of bytes the compiler adds up other columns together in large tiles than in those of single queries.
                lines, warps = 32, 4
            cut = Cut(QUERY_TILE, 0, segment, lines=lines, keys=keys, num_warps=warps, num_stages=stages)
            tile_attention(*given, *tiles, out, scale, cap, window, cut, *beside)
        return out

    def choose_share(self, programs: int) -> tuple[int, int]:
        return next((share for limit, share in self.segment_shares if programs <= limit), _LEAST_SHARE)


def segment_size(least: int, max_len: int) -> int:
    """Keys of a segment: `least` times a power of two, so that the longest context has at most MAX_SEGMENTS."""
    while least * MAX_SEGMENTS < max_len:
        least *= 2
    return least
