"""Paged attention in plain torch: the reference, batched over rows, with no Python loop per token.

Its results are bitwise independent of batching, chunking and prefix hits. A query sees keys 0..p whatever step it
runs in; the maximum is exact in any order; the sum over keys runs in tiles of KEY_TILE at absolute positions, one
tile after the other, and masked keys add exact zeros. The products are padded to as many query rows as the
self-check asks for (ops/invariance.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.attention.base import (
    NO_HEAD_NORM,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionSpec,
    HeadNorm,
    LayerCache,
    Rotation,
    Written,
)
from quire.ops.fp8 import FP8, FP8_MAX
from quire.ops.invariance import MIN_ROWS, all_rows_equal, probe_row, row_ladder
from quire.ops.rope import split_qkv
from quire.ops.scale import soft_cap

KEY_TILE = 128  # a multiple of every block size
QUERY_TILE, MIN_QUERY_TILE = 128, 16
MAX_SUM = 256  # dimensions that one matmul sums over
WORKSPACE_BYTES = 64 << 20  # aim for one unit's gathered keys and values, and for its scores


@dataclass(slots=True)
class Unit:
    """Rows with equally many queries and about as long a context, computed together."""

    tokens: Tensor  # [rows * queries] int64 index into the step's tokens
    block_ids: Tensor  # [rows * blocks] int32
    num_rows: int
    num_queries: int
    mask: Tensor  # [rows, queries, 1, keys] bool: True where the query must not see the key


@dataclass(slots=True)
class TorchMetadata(AttentionMetadata):
    batch: AttentionBatch
    slots: Tensor  # [num_tokens] int64, without padding
    # Layers of one group ask for the same units; built by the first of them.
    units: dict[tuple[int, int, int, bool], list[Unit]] = field(default_factory=dict)


class TorchAttention(AttentionBackend):
    name = "torch_ref"
    block_axis = 2

    def __init__(self) -> None:
        self._min_rows: dict[tuple[int, int, torch.dtype], int] = {}

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return dtype, FP8

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        # Heads first: gathering a row's blocks then gives [heads, keys, dim] without another copy.
        return (2, num_kv_heads, num_blocks, block_size, head_dim)

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        keys = _padded_tiles(-(-max_model_len // KEY_TILE)) * KEY_TILE
        # A unit is one row's keys and values, and its scores, of which soft-capping makes the most copies.
        smallest_unit = (
            keys * (2 * spec.num_kv_heads * spec.head_dim + 4 * spec.num_heads * MIN_QUERY_TILE) * itemsize
        )
        return max(4 * WORKSPACE_BYTES, smallest_unit)

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> TorchMetadata:
        # Padding is not written: the null block stays zero, as what stands in for keys that nobody may see.
        return TorchMetadata(batch, batch.slot_mapping[: batch.num_tokens])

    def write(self, at: LayerCache, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation) -> Written:
        spec, cache, metadata = at
        assert isinstance(metadata, TorchMetadata)
        norm: tuple[Tensor | None, Tensor | None, float, float] = head_norm or NO_HEAD_NORM
        query, key, value = split_qkv(qkv, spec.num_heads, spec.num_kv_heads, *norm, rotation, spec.norms_rotated)
        flat = cache.view(2, spec.num_kv_heads, -1, spec.head_dim)
        slots, num_tokens = metadata.slots, metadata.slots.shape[0]
        for part, x, scale in zip(flat, (key, value), spec.kv_scales, strict=True):
            keep(part, 1, slots, x[:num_tokens].transpose(0, 1) / scale)
        return Written(query)

    def attend(self, at: LayerCache, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, TorchMetadata)
        query = written.query
        scaled = query * (spec.scale * spec.kv_scales[0])
        out = query.new_zeros(query.shape[0], spec.num_heads * spec.head_dim)
        min_rows = self.find_min_rows(spec.head_dim, spec.head_dim, query.dtype)
        for unit in plan_units(metadata, spec, query.element_size()):
            shape = (spec.num_kv_heads * unit.num_rows, -1, spec.head_dim)
            keys, values = (part.index_select(1, unit.block_ids).view(shape).to(query.dtype) for part in cache)
            out.index_copy_(0, unit.tokens, attend_unit(spec, scaled, keys, values, unit, unit.mask, min_rows))
        return out.mul_(spec.kv_scales[1])

    def find_min_rows(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
        found = self._min_rows.get((head_dim, value_dim, dtype))
        if found is None:
            found = self._min_rows[(head_dim, value_dim, dtype)] = _probe(head_dim, value_dim, dtype)
        return found


def keep(cache: Tensor, axis: int, slots: Tensor, x: Tensor) -> None:
    """Write x into a part of a cache, rounded to its type; what is too large for fp8 becomes the largest."""
    if cache.dtype == FP8:
        cache, x = cache.view(torch.uint8), x.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    cache.index_copy_(axis, slots, x.to(cache.dtype))


def plan_units(metadata: TorchMetadata, spec: AttentionSpec, itemsize: int) -> list[Unit]:
    """Those of a layer; made by the first layer that asks like this."""
    plan_key = (spec.kernel_window, spec.num_kv_heads * spec.head_dim, spec.num_heads, spec.causal)
    units = metadata.units.get(plan_key)
    if units is None:
        units = metadata.units[plan_key] = list(_plan_units(metadata.batch, spec, itemsize))
    return units


def _plan_units(batch: AttentionBatch, spec: AttentionSpec, itemsize: int) -> Iterator[Unit]:
    """Cut rows into query tiles and join tiles of equal shape, as many as the workspace holds."""
    buckets: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}
    token = 0
    all_queries, contexts, attended = batch.known_lengths()
    for row, (num_queries, context, keys) in enumerate(zip(all_queries, contexts, attended or contexts, strict=True)):
        tile = _query_tile(spec, context, itemsize)
        for start in range(0, num_queries, tile):
            queries = min(tile, num_queries - start)
            position = context - num_queries + start
            last_tile = (_end_seen(spec, position + queries - 1, keys) - 1) // KEY_TILE + 1
            first_tile = int(spec.first_seen(torch.tensor(position))) // KEY_TILE
            width = _padded_tiles(last_tile - first_tile)
            buckets.setdefault((queries, first_tile, width), []).append((row, token + start, position, keys))
        token += num_queries
    for (queries, first_tile, width), members in buckets.items():
        keys = width * KEY_TILE
        per_row = keys * itemsize * max(2 * spec.num_kv_heads * spec.head_dim, spec.num_heads * queries)
        step = max(1, WORKSPACE_BYTES // per_row)
        for start in range(0, len(members), step):
            yield _make_unit(batch, spec, queries, first_tile * KEY_TILE, keys, members[start : start + step])


def _end_seen(spec: AttentionSpec, position: int, keys: int) -> int:
    """The end of the keys that a token at this position sees, of those that its row attends to."""
    if spec.causal:
        return position + 1
    return keys if spec.sliding_window is None else min(keys, position + spec.sliding_window)


def _ends_seen(spec: AttentionSpec, positions: Tensor, keys: Tensor) -> Tensor:
    """The same of many: positions [rows, queries], keys [rows, 1]."""
    if spec.causal:
        return positions + 1
    ends = keys.expand_as(positions)
    return ends if spec.sliding_window is None else torch.minimum(ends, positions + spec.sliding_window)


def _query_tile(spec: AttentionSpec, context: int, itemsize: int) -> int:
    """As many queries at once as keep the scores within the workspace."""
    window = spec.sliding_window
    keys = context if window is None else min(context, (window if spec.causal else 2 * window) + QUERY_TILE)
    per_query = _padded_tiles(-(-keys // KEY_TILE)) * KEY_TILE * spec.num_heads * itemsize
    tile = QUERY_TILE
    while tile > MIN_QUERY_TILE and tile * per_query > WORKSPACE_BYTES:
        tile //= 2
    return tile


def _padded_tiles(num_tiles: int) -> int:
    """Lengths are rounded up to a power of two, so that a batch of mixed lengths makes few units.

    What is added is masked, and adds zeros.
    """
    return 1 << (num_tiles - 1).bit_length()


def _make_unit(
    batch: AttentionBatch,
    spec: AttentionSpec,
    num_queries: int,
    first_key: int,
    num_keys: int,
    members: list[tuple[int, int, int, int]],
) -> Unit:
    device = batch.tables.device
    rows, tokens, positions, attended = torch.tensor(members, device=device).unbind(1)
    offsets = torch.arange(num_queries, device=device)
    query_positions = positions[:, None] + offsets  # [rows, queries]
    key_positions = torch.arange(first_key, first_key + num_keys, device=device)
    ends = _ends_seen(spec, query_positions, attended[:, None])
    mask = key_positions >= ends[:, :, None]
    if spec.sliding_window is not None:
        mask |= key_positions < spec.first_seen(query_positions)[:, :, None]
    first_block, num_blocks = first_key // batch.block_size, num_keys // batch.block_size
    tables = batch.tables.index_select(0, batch.rows[rows])[:, first_block : first_block + num_blocks]
    tables = torch.nn.functional.pad(tables, (0, num_blocks - tables.shape[1]))
    # The null block stands in for blocks that no query sees: they may belong to others by now, and hold anything.
    blocks = torch.arange(first_block, first_block + num_blocks, device=device)
    unseen = blocks > (ends[:, -1:] - 1) // batch.block_size
    if spec.sliding_window is not None:
        unseen |= blocks < spec.first_seen(positions)[:, None] // batch.block_size
    tables = tables.masked_fill(unseen, 0)
    return Unit(
        tokens=(tokens[:, None] + offsets).flatten(),
        block_ids=tables.flatten(),
        num_rows=len(members),
        num_queries=num_queries,
        mask=mask[:, :, None, :],
    )


def attend_unit(
    spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, unit: Unit, mask: Tensor, min_rows: int
) -> Tensor:
    """Attention of one unit: [rows * queries, heads * value dim].

    query [num_tokens, heads, dim] is scaled; keys [KV heads * rows, keys, dim] and values alike; mask as the unit's.
    """
    heads, group, dim, rows = spec.num_kv_heads, spec.group_size, spec.head_dim, unit.num_rows
    value_dim = values.shape[-1]
    num_keys, query_rows = keys.shape[1], unit.num_queries * group
    q = query.index_select(0, unit.tokens).view(rows, unit.num_queries, heads, group, dim)
    q = q.permute(2, 0, 1, 3, 4).reshape(heads * rows, query_rows, dim)
    if query_rows < min_rows:
        q = torch.nn.functional.pad(q, (0, 0, 0, min_rows - query_rows))
    scores = _scores(q, keys)[:, :query_rows]
    if spec.soft_cap is not None:
        scores = soft_cap(scores.contiguous(), spec.soft_cap)
    scores = scores.reshape(heads, rows, unit.num_queries, group, num_keys).masked_fill(mask, -torch.inf)
    # Without a key to see, in both directions, the result is 0; else a score is finite and the total is at least 1.
    highest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(highest).exp_().view(heads * rows, query_rows, num_keys)
    if query_rows < min_rows:
        weights = torch.nn.functional.pad(weights, (0, 0, 0, min_rows - query_rows))
    total = weights.new_zeros(*weights.shape[:2])
    out = weights.new_zeros(*weights.shape[:2], value_dim)
    for start in range(0, num_keys, KEY_TILE):
        tile = weights[:, :, start : start + KEY_TILE].contiguous()
        total += tile.sum(-1)
        out.baddbmm_(tile, values[:, start : start + KEY_TILE])
    if spec.sinks is not None:
        sinks = spec.sinks.view(heads, 1, 1, group, 1).sub(highest).exp_().view(heads * rows, query_rows)
        total[:, :query_rows] += sinks
    out = out.div_(total.clamp_min_(1.0)[:, :, None])[:, :query_rows]
    out = out.reshape(heads, rows, unit.num_queries, group, value_dim)
    return out.permute(1, 2, 0, 3, 4).reshape(rows * unit.num_queries, heads * group * value_dim)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """[batch, queries, dim] and [batch, keys, dim] -> [batch, queries, keys]; long sums in parts, see invariance."""
    scores = torch.bmm(query[..., :MAX_SUM], keys[..., :MAX_SUM].transpose(1, 2))
    for start in range(MAX_SUM, keys.shape[-1], MAX_SUM):
        part = slice(start, start + MAX_SUM)
        scores.baddbmm_(query[..., part], keys[..., part].transpose(1, 2))
    return scores


def _probe(head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """The fewest query rows from which on both products give a row the same bits."""
    keys = probe_row(KEY_TILE * head_dim, dtype, seed=1).view(1, KEY_TILE, head_dim)
    query, weight = probe_row(head_dim, dtype, seed=2), probe_row(KEY_TILE, dtype, seed=3).abs()

    def scores(x: Tensor) -> Tensor:
        return _scores(x.expand(2, -1, -1).contiguous(), keys.expand(2, -1, -1).contiguous())[1]

    def outputs(x: Tensor) -> Tensor:
        out = x.new_zeros(2, x.shape[0], value_dim)
        values = keys[..., :value_dim].expand(2, -1, -1).contiguous()
        return out.baddbmm_(x.expand(2, -1, -1).contiguous(), values)[1]

    for min_rows in MIN_ROWS:
        sizes = row_ladder(min_rows, 8 * QUERY_TILE)
        sizes += [size + 1 for size in sizes] + [size + 3 for size in sizes]
        if all_rows_equal(scores, query, sizes) and all_rows_equal(outputs, weight, sizes):
            return min_rows
    return MIN_ROWS[-1]
