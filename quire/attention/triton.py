"""Paged attention with Triton kernels; long prompts without a cached prefix go through torch's fused attention."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from quire.attention.base import (
    NO_HEAD_NORM,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionSpec,
    HeadNorm,
    HostLengths,
    LayerCache,
    Rotation,
    WorkPlan,
    Written,
)
from quire.kernels.triton import launch, quantize
from quire.kernels.triton.decode_attention import decode_attention
from quire.kernels.triton.even_attention import TileLine, even_attention, heads_fit, line_up_tiles, tiles_fit
from quire.kernels.triton.limited_attention import limited_attention, limited_tiles
from quire.kernels.triton.prefill_attention import QUERY_TILE, Split, prefill_attention
from quire.kernels.triton.qkv import prepare_qkv
from quire.kernels.triton.tile_attention import Cut, tile_attention
from quire.ops.split_k import PartialSums
from quire.types.errors import ConfigError

# Rows of up to this many queries, such as prefix hits, are one tile whose keys are split over programs.
FEW_QUERIES = 16
MAX_FEW_ROWS = 16  # in a small step; of more rows, fewer programs share the keys
_FEW = Cut(tile=FEW_QUERIES, splits=16)
_FEW_OF_LONG = Cut(tile=FEW_QUERIES, splits=32, long=8192)  # two programs a multiprocessor: 131 instead of 210 us
# Programs that keep every multiprocessor busy although rows differ in length; more splits only add work.
_WANTED_PROGRAMS = 512
_MAX_SPLITS = 32
_EVENED_PROGRAMS = 1536


# Contexts are alike where the longest is at most _ALIKE times the mean. It matters from _MIN_ALIKE_ROWS on:
# attention of fewer rows is the same either way, and each kind of step is captured when it first comes up.
_ALIKE = 1.15
_MIN_ALIKE_ROWS = 32
# Prompts, beyond whole tiles, that a captured step may hold.
_EXTRA_TILES = 32
_MAX_SPLIT_TOKENS = 1024  # of a step in which programs share the keys of a tile
_SPLIT_PROGRAMS = 384  # a little less than three on each multiprocessor of an H200
_MIN_TILE_SPLITS, _MAX_TILE_SPLITS = 3, 16


class DecodeKind(NamedTuple):
    """A step of one query a row."""

    alike: bool = False  # contexts hardly differ


class MixedKind(NamedTuple):
    """Which kernels a step of any numbers of queries needs, by the kinds of rows it has."""

    singles: bool = False
    few: bool = False
    tiles: bool = False
    partial_tiles: bool = False
    whole: tuple[tuple[int, int], ...] = ()  # (first token, length) of long prompts without a cached prefix
    long_context: bool = False  # some partial tile sees many keys


# A prompt, beside rows that decode, the end of a prompt whose beginning is cached, and both; a chunk of few tokens
# beside a larger one.
_USUAL = (
    MixedKind(tiles=True, partial_tiles=True),
    MixedKind(singles=True, tiles=True, partial_tiles=True),
    MixedKind(few=True),
    MixedKind(singles=True, few=True),
    MixedKind(few=True, tiles=True, partial_tiles=True),
    MixedKind(singles=True, few=True, tiles=True, partial_tiles=True),
)
_USUAL_LONG = tuple(kind._replace(long_context=True) for kind in _USUAL if kind.tiles)
_Pair = tuple[Tensor, Tensor]


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    batch: AttentionBatch
    singles: _Pair  # row and token of each row of one query, int32
    few: _Pair  # row and offset of each row of few queries
    tiles: _Pair  # row and offset of each tile of the others; of whole prompts, of those with fewer keys than tokens
    partial_tiles: _Pair  # the same without whole prompts
    whole: tuple[tuple[int, int], ...] = ()
    long_context: bool = False  # some partial tile sees many keys
    line: TileLine | None = None  # of single queries, where their work can be shared evenly
    alike: bool = False  # their contexts hardly differ
    offsets: Tensor | None = None  # of single queries within their rows: zeros, made once for all layers


class TritonAttention(AttentionBackend):
    name = "triton"
    records = True
    max_head_dim: int | None = 256
    shares = True  # a row's keys over as many programs as suits the step
    splits_tiles = True  # in steps of few tiles, programs share the keys of a tile ...
    long_context = 4096  # ... from this many keys on
    query_tile = QUERY_TILE
    heads_per_program: int | None = None  # in `write`; None: whatever is fastest for the number of tokens
    # From this many queries on torch's fused attention is faster by more than launching it for each prompt costs.
    fused_queries = 2048
    few_queries = FEW_QUERIES  # rows of at most this many queries are one tile whose keys are split ...
    most_few_rows = 128  # ... for as many rows of a step; more of them are tiles like any other
    min_shared_rows = 8  # from this many rows of one query on, programs share all their keys evenly
    unavailable = staticmethod(launch.unavailable)
    multiprocessors = staticmethod(launch.multiprocessors)

    def lacks(self, spec: AttentionSpec) -> str | None:
        if spec.causal or (spec.soft_cap is None and spec.sinks is None):
            return None
        return "bidirectional attention with a soft cap or sinks"

    def captures_spec(self, spec: AttentionSpec, dtype: torch.dtype) -> bool:
        return spec.causal or dtype.itemsize == 2  # in float32 the host calls a kernel for each prompt

    def start(self) -> None:
        reason = self.unavailable()
        if reason is not None:
            raise ConfigError(f"attention_backend is {self.name!r}, but {reason}; leave --attention-backend out")

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (dtype,) if quantize.unavailable() else (dtype, quantize.FP8)

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        return 2 * max_model_len * spec.num_kv_heads * spec.head_dim * itemsize

    def parts_bytes(self, spec: AttentionSpec, max_rows: int, max_model_len: int) -> int:
        few = MAX_FEW_ROWS * FEW_QUERIES * _cut_of_few(MAX_FEW_ROWS, max_model_len).splits
        singles = max(2 * max_rows, _WANTED_PROGRAMS // spec.num_kv_heads)
        line = max_rows * max_model_len // 2  # of tiles that are shared evenly
        tiles = 0
        if self.splits_tiles and max_model_len >= self.long_context:
            steps = (1 << power for power in range(_MAX_SPLIT_TOKENS.bit_length()))
            tiles = max(tokens * _split_tiles(spec, tokens).splits for tokens in steps)
        return max(few, singles, tiles) * spec.num_heads * (spec.head_dim + 2) * 4 + line

    def few_rows(self, num_tokens: int) -> int:
        """Rows of few queries in a step that have a tile each: drafts make all rows such rows."""
        return min(max(MAX_FEW_ROWS, num_tokens // 4), self.most_few_rows)

    def divide(self, lengths: HostLengths) -> WorkPlan:
        if self.whole_prompts:
            limited = limited_tiles(lengths.queries, lengths.attended or lengths.queries)
            return WorkPlan(MixedKind(tiles=bool(limited[0])), ([], [], [], [], *limited, [], []))
        singles: tuple[list[int], list[int]] = ([], [])
        few: tuple[list[int], list[int]] = ([], [])
        tiles: tuple[list[int], list[int]] = ([], [])
        partial_tiles: tuple[list[int], list[int]] = ([], [])
        whole = []
        longest = 0  # keys that a partial tile sees
        token, most_few = 0, self.few_rows(sum(lengths.queries))
        for index, (queries, context) in enumerate(zip(lengths.queries, lengths.contexts, strict=True)):
            if queries == 1:
                singles[0].append(index)
                singles[1].append(token)
            elif queries <= self.few_queries and len(few[0]) < most_few:
                few[0].append(index)
                few[1].append(0)
            else:
                offsets = range(0, queries, QUERY_TILE)
                is_whole = queries == context >= self.fused_queries
                for rows, starts in (tiles,) if is_whole else (tiles, partial_tiles):
                    rows.extend([index] * len(offsets))
                    starts.extend(offsets)
                if is_whole:
                    whole.append((token, queries))
                else:
                    longest = max(longest, context)
            token += queries
        kind = MixedKind(
            singles=bool(singles[0]),
            few=bool(few[0]),
            tiles=bool(tiles[0]),
            partial_tiles=bool(partial_tiles[0]),
            whole=tuple(whole),
            long_context=self.splits_tiles and longest >= self.long_context,
        )
        return WorkPlan(kind, (*singles, *few, *tiles, *partial_tiles))

    def decode_kind(self, contexts: list[int] | None, num_rows: int) -> DecodeKind:
        if contexts is None or num_rows < _MIN_ALIKE_ROWS:
            return DecodeKind()
        return DecodeKind(alike=max(contexts) * len(contexts) <= _ALIKE * sum(contexts))

    def list_lengths(self, num_tokens: int, max_rows: int) -> tuple[int, ...]:
        tiles = num_tokens // QUERY_TILE + min(max(_EXTRA_TILES, num_tokens // QUERY_TILE), num_tokens)
        few = self.few_rows(num_tokens)
        return (max_rows, max_rows, few, few, tiles, tiles, tiles, tiles)

    def usual_kinds(self, num_tokens: int, max_context: int, is_full: bool) -> Sequence[MixedKind]:
        if self.whole_prompts:
            return (MixedKind(),)
        if is_full:
            return (*_USUAL[:2], MixedKind(tiles=True, whole=((0, num_tokens),)))
        return _USUAL + (_USUAL_LONG if self.splits_tiles and max_context >= self.long_context else ())

    def captures(self, work: WorkPlan, num_tokens: int) -> bool:
        assert isinstance(work.kind, MixedKind)
        return work.kind.whole in ((), ((0, num_tokens),))

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> TritonMetadata:
        if isinstance(kind, DecodeKind):
            return self._prepare_decode(batch, kind)
        assert isinstance(kind, MixedKind)
        pairs = [
            (lists[2 * index][: None if wanted else 0], lists[2 * index + 1][: None if wanted else 0])
            for index, wanted in enumerate(kind[:4])
        ]
        return TritonMetadata(batch, pairs[0], pairs[1], pairs[2], pairs[3], kind.whole, kind.long_context)

    def _prepare_decode(self, batch: AttentionBatch, kind: DecodeKind) -> TritonMetadata:
        index = batch.query_starts[:-1]  # a query each
        none = (index[:0], index[:0])
        metadata = TritonMetadata(batch, (index, index), none, none, none, alike=kind.alike)
        if self.shares and index.shape[0] >= self.min_shared_rows and tiles_fit(batch.block_size):
            metadata.line = line_up_tiles(
                batch.contexts, batch.rows, batch.tables, batch.block_size, batch.padding_row
            )
        return metadata

    def write(
        self, at: LayerCache, qkv: Tensor | PartialSums, head_norm: HeadNorm | None, rotation: Rotation
    ) -> Written:
        spec, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        if not spec.causal and rotation is None and head_norm is None and isinstance(qkv, Tensor):
            # Nothing is to be done, and no later step reads the cache.
            heads = qkv.unflatten(-1, (-1, spec.head_dim))
            return Written(*heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1))
        norm: tuple[Tensor | None, Tensor | None, float, float] = head_norm or NO_HEAD_NORM
        keys = values = None
        takes_whole = metadata.whole and isinstance(qkv, Tensor) and self.takes_whole(spec, qkv, cache)
        if isinstance(qkv, Tensor) and (takes_whole or not spec.causal):
            keys = qkv.new_empty(qkv.shape[0], spec.num_kv_heads, spec.head_dim)
            first_value = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
            values = qkv[:, first_value:].unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        given = (*norm, rotation, metadata.batch.slot_mapping, cache, spec.num_heads, qkv.dtype)
        product = qkv if isinstance(qkv, Tensor) else qkv.values
        query = prepare_qkv(product, *given, keys, self.heads_per_program, spec.norms_rotated, *spec.kv_scales)
        return Written(query, keys, values)

    def write_partial_sums(
        self, at: LayerCache, qkv: PartialSums, head_norm: HeadNorm | None, rotation: Rotation
    ) -> Written:
        assert isinstance(at.metadata, TritonMetadata)
        assert not at.metadata.whole, "matmuls of this many tokens are never split along K"
        return self.write(at, qkv, head_norm, rotation)

    def takes_whole(self, spec: AttentionSpec, qkv: Tensor, cache: Tensor) -> bool:
        """Whether long prompts without a cached prefix attend over the keys and values of their step."""
        return is_plain(spec)

    def fills(self, programs: int) -> bool:
        """Whether programs of equal length, one a row and KV head, leave next to nothing of the device idle."""
        at_once = 4 * self.multiprocessors()  # programs that fit on the device
        return programs >= 0.9 * at_once * -(-programs // at_once) > 0

    def attend(self, at: LayerCache, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, TritonMetadata)
        batch, query = metadata.batch, written.query
        if not spec.causal and written.keys is not None:
            return both_directions(spec, written, batch, metadata.tiles)
        plain = is_plain(spec)
        if plain and metadata.whole == ((0, query.shape[0]),):
            return _whole_prompt(spec, written, slice(0, query.shape[0]))
        out = torch.empty(query.shape[0], spec.num_heads * spec.head_dim, dtype=query.dtype, device=query.device)
        scale, soft_cap, window = spec.scale * spec.kv_scales[0], spec.soft_cap, spec.kernel_window
        beside: dict[str, Any] = {"sinks": spec.sinks, "out_scale": spec.kv_scales[1]}
        shared = (batch.rows, batch.contexts, batch.query_starts)
        singles, few = metadata.singles, metadata.few
        programs, fit = singles[0].shape[0] * spec.num_kv_heads, heads_fit(spec.head_dim, query.element_size())
        one_each = metadata.alike and self.fills(programs)
        if metadata.line is not None and not window and fit and not one_each:
            programs = 2 * self.multiprocessors()
            even_attention(query, cache, metadata.line, out, scale, soft_cap, programs, **beside)
            return out
        if programs:
            splits, keys, stages = (1, 64, 3) if one_each else _choose_splits(programs, batch.max_context)
            if not fit:
                keys, stages = 64, 2
            given = (query, cache, batch.tables, *singles, *shared, out, scale, soft_cap, window)
            decode_attention(*given, splits=splits, keys=keys, num_stages=stages, **beside)
        if few[0].shape[0]:
            cut = _cut_of_few(few[0].shape[0], batch.max_context)
            given_few = (query, cache, batch.tables, *shared, *few, out, scale, soft_cap, window, cut)
            tile_attention(*given_few, **beside)
        tiles = metadata.partial_tiles if plain else metadata.tiles
        if tiles[0].shape[0]:
            split = None
            if metadata.long_context and not window and query.shape[0] <= _MAX_SPLIT_TOKENS:
                split = _split_tiles(spec, query.shape[0])
            given_tiles = (query, cache, batch.tables, *shared, *tiles, out, scale, soft_cap, window)
            prefill_attention(*given_tiles, split=split, **beside)
        for start, length in metadata.whole if plain else ():
            out[start : start + length] = _whole_prompt(spec, written, slice(start, start + length))
        return out


def is_plain(spec: AttentionSpec) -> bool:
    """Whether a query sees all keys before it and nothing else, and scores are as they are."""
    return spec.soft_cap is None and spec.sliding_window is None and spec.sinks is None


def _choose_splits(programs: int, max_context: int) -> tuple[int, int, int]:
    """Programs that share a row's keys, keys at a time, and stages of the pipeline; measured on an H200.

    Few rows are split until they fill the device, with at least two tiles of keys each. Up to 192 rows of eight KV
    heads, two programs a row even out their different lengths; more rows do that by themselves. Most steps do not
    come here: their keys are shared evenly.
    """
    splits = 1
    while splits < _MAX_SPLITS and programs * splits * 2 <= _WANTED_PROGRAMS and max_context > 64 * splits:
        splits *= 2
    if splits == 1 and programs <= _EVENED_PROGRAMS and max_context > 256:
        return 2, 128, 2
    return splits, 64, 3


def _cut_of_few(num_rows: int, max_context: int) -> Cut:
    """How programs share the keys of rows of few queries: more rows have fewer programs each."""
    if num_rows <= MAX_FEW_ROWS and max_context >= _FEW_OF_LONG.long:
        return _FEW_OF_LONG
    splits = _FEW.splits
    while splits > 2 and splits * num_rows > _FEW.splits * MAX_FEW_ROWS:
        splits //= 2
    return replace(_FEW, splits=splits)


def _split_tiles(spec: AttentionSpec, num_tokens: int) -> Split:
    """How programs share the keys of tiles in a step of this many tokens; measured on an H200.

    Programs of few queries have several heads of one KV head, so that fewer of their lines are empty.
    """
    heads = math.gcd(spec.group_size, 4) if num_tokens <= 256 else 1
    programs = -(-num_tokens * heads // QUERY_TILE) * (spec.num_heads // heads)
    return Split(min(_MAX_TILE_SPLITS, max(_MIN_TILE_SPLITS, _SPLIT_PROGRAMS // programs)), heads)


def _whole_prompt(spec: AttentionSpec, written: Written, span: slice) -> Tensor:
    """Causal attention of a prompt, whose tokens are those of `span`, over itself."""
    assert written.keys is not None
    assert written.values is not None
    q, k, v = (x[span].transpose(0, 1)[None] for x in (written.query, written.keys, written.values))
    return fused_attention(q, k, v, spec.scale)[0].transpose(0, 1).reshape(span.stop - span.start, -1)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of [1, heads, n, dim] by the fastest kernel of torch that takes them."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def both_directions(spec: AttentionSpec, written: Written, batch: AttentionBatch, limited: _Pair) -> Tensor:
    """Attention of whole prompts over themselves, where tokens see those after them too; `limited`: see `tiles`."""
    query, keys, values = written.query, written.keys, written.values
    assert keys is not None
    assert values is not None
    side = -1 if spec.sliding_window is None else spec.sliding_window - 1
    if query.is_cuda and query.element_size() == 2:  # the only ones that there is a fused kernel for
        starts, most = batch.query_starts, min(batch.max_context, query.shape[0])
        if spec.group_size > 1:  # PyTorch 2.11 cannot be told that several heads share one of keys
            keys, values = (x.repeat_interleave(spec.group_size, dim=1) for x in (keys, values))
        given = (query, keys, values, starts, starts, most, most)
        fused = varlen_attn(*given, scale=spec.scale, window_size=(side, side))
        assert isinstance(fused, Tensor)
        out = fused
    else:
        out, start = torch.zeros_like(query), 0
        # On a GPU these are never captured, so that the host knows them.
        for length in batch.known_lengths().queries:
            part = slice(start, start + length)
            q, k, v = (x[part].transpose(0, 1)[None] for x in (query, keys, values))
            mask = None
            if side >= 0:
                at = torch.arange(length, device=query.device)
                mask = (at[:, None] - at).abs() <= side
            own = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=spec.scale, enable_gqa=True)
            out[part] = own[0].transpose(0, 1)
            start += length
    out = out.flatten(1)
    if limited[0].shape[0]:
        assert batch.attended is not None
        place = (batch.query_starts, batch.attended, *limited)
        limited_attention(query, keys, values, *place, out, spec.scale, spec.kernel_window)
    return out
