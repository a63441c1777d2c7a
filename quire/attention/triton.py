"""Paged attention with Triton kernels; long prompts without a cached prefix go through torch's fused attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.attention.base import (
    NO_HEAD_NORM,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionSpec,
    HeadNorm,
    Rotation,
)
from quire.kernels.triton import quantize
from quire.kernels.triton.decode_attention import decode_attention
from quire.kernels.triton.even_attention import TileLine, even_attention, heads_fit, line_up_tiles, tiles_fit
from quire.kernels.triton.launch import multiprocessors, unavailable
from quire.kernels.triton.prefill_attention import QUERY_TILE, prefill_attention
from quire.kernels.triton.qkv import prepare_qkv
from quire.kernels.triton.tile_attention import Cut, tile_attention
from quire.ops.parts import Parts
from quire.platform.transfer import upload
from quire.types.errors import ConfigError

# From this many queries on torch's fused attention is faster by more than launching it for each prompt costs.
_FUSED_QUERIES = 2048
# Rows of up to this many queries, such as prefix hits, are one tile whose keys are split over programs.
FEW_QUERIES = 16
MAX_FEW_ROWS = 16  # in a step; more of them are tiles like any other
_FEW = Cut(tile=FEW_QUERIES, splits=16)
# From this many rows of one query on, programs share all their keys evenly.
MIN_SHARED_ROWS = 8
# Programs that keep every multiprocessor busy although rows differ in length; more splits only add work.
_WANTED_PROGRAMS = 512
_MAX_SPLITS = 32
_EVENED_PROGRAMS = 1536


@dataclass(slots=True)
class TritonMetadata(AttentionMetadata):
    batch: AttentionBatch
    splits_for: int  # longest context
    singles: tuple[Tensor, Tensor]  # row and token of each row of one query, int32
    few: tuple[Tensor, Tensor]  # row and offset of each row of few queries
    tiles: tuple[Tensor, Tensor]  # row and offset of each tile of the others
    partial_tiles: tuple[Tensor, Tensor]  # the same without whole prompts
    whole: list[tuple[int, int]] = field(default_factory=list)  # (first token, length) of whole prompts
    # What whole prompts attend over; the current layer's, from write to attend.
    qkv: Tensor | None = None
    keys: Tensor | None = None  # [num_tokens, num_kv_heads, head_dim]
    line: TileLine | None = None  # of single queries, where their work can be shared evenly
    alike: bool = False  # their contexts hardly differ
    offsets: Tensor | None = None  # of single queries within their rows: zeros, made once for all layers


@dataclass(slots=True)
class RowKinds:
    """The same as the host knows it, before it is on the device."""

    singles: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    few: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    tiles: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    partial_tiles: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    whole: list[tuple[int, int]] = field(default_factory=list)


def sort_rows(query_lens: list[int], context_lens: list[int]) -> RowKinds:
    """Which kernels take the rows of a step."""
    kinds = RowKinds()
    token = 0
    for index, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if queries == 1:
            kinds.singles[0].append(index)
            kinds.singles[1].append(token)
        elif queries <= FEW_QUERIES and len(kinds.few[0]) < MAX_FEW_ROWS:
            kinds.few[0].append(index)
            kinds.few[1].append(0)
        else:
            offsets = range(0, queries, QUERY_TILE)
            is_whole = queries == context >= _FUSED_QUERIES
            for rows, starts in (kinds.tiles,) if is_whole else (kinds.tiles, kinds.partial_tiles):
                rows.extend([index] * len(offsets))
                starts.extend(offsets)
            if is_whole:
                kinds.whole.append((token, queries))
        token += queries
    return kinds


@dataclass(frozen=True, slots=True)
class RecordedLists:
    """What a recorded step reads about its rows, as in TritonMetadata; unused entries are -1."""

    singles: tuple[Tensor, Tensor]
    few: tuple[Tensor, Tensor]
    tiles: tuple[Tensor, Tensor]

    def only(self, kinds: tuple[bool, ...]) -> RecordedLists:
        """These lists, without entries where a kind is not wanted."""
        lists = zip((self.singles, self.few, self.tiles), kinds, strict=True)
        return RecordedLists(*(pair if wanted else (pair[0][:0], pair[1][:0]) for pair, wanted in lists))


class TritonAttention(AttentionBackend):
    name = "triton"
    records = True
    max_head_dim = 256
    shares = True  # a row's keys over as many programs as suits the step
    heads_per_program: int | None = None  # in `write`; None: whatever is fastest for the number of tokens

    def start(self) -> None:
        reason = unavailable()
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
        few = MAX_FEW_ROWS * FEW_QUERIES * _FEW.splits
        singles = max(2 * max_rows, _WANTED_PROGRAMS // spec.num_kv_heads)
        line = max_rows * max_model_len // 2  # of tiles that are shared evenly
        return max(few, singles) * spec.num_heads * (spec.head_dim + 2) * 4 + line

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        blocks = cache[:, block_ids]
        if blocks.dtype.itemsize == 1:  # fp8 has no infinities, and one NaN of either sign
            bits = blocks.view(torch.uint8)
            healed = torch.where(bits & 0x7F == 0x7F, 0, bits).view(cache.dtype)
        else:
            healed = blocks.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        cache.view(torch.uint8)[:, block_ids] = healed.view(torch.uint8)

    def prepare(self, batch: AttentionBatch) -> TritonMetadata:
        kinds = sort_rows(batch.query_lens, batch.context_lens)
        columns = [*kinds.singles, *kinds.few, *kinds.tiles, *kinds.partial_tiles]
        packed = upload([x for column in columns for x in column], batch.rows.device)
        parts = packed.split([len(column) for column in columns])
        lists = ((parts[0], parts[1]), (parts[2], parts[3]), (parts[4], parts[5]), (parts[6], parts[7]))
        return TritonMetadata(batch, max(batch.context_lens), *lists, kinds.whole)

    def prepare_recorded(
        self, batch: AttentionBatch, lists: RecordedLists, max_context: int, whole: list[tuple[int, int]]
    ) -> TritonMetadata:
        """For a recorded step: the lists stand in fixed buffers, padded with -1."""
        return TritonMetadata(batch, max_context, lists.singles, lists.few, lists.tiles, lists.tiles, whole)

    def prepare_decode(
        self, batch: AttentionBatch, max_context: int, padding_row: int, *, alike: bool
    ) -> TritonMetadata:
        """For a step of single queries whose contexts only the device knows, but that they are `alike`, or not."""
        index = batch.query_starts[:-1]  # a query each
        none = (index[:0], index[:0])
        metadata = TritonMetadata(batch, max_context, (index, index), none, none, none, alike=alike)
        if self.shares and index.shape[0] >= MIN_SHARED_ROWS and tiles_fit(batch.block_size):
            metadata.line = line_up_tiles(batch.contexts, batch.rows, batch.tables, batch.block_size, padding_row)
        return metadata

    def write(
        self,
        spec: AttentionSpec,
        qkv: Tensor | Parts,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, TritonMetadata)
        norm: tuple[Tensor | None, Tensor | None, float, float] = head_norm or NO_HEAD_NORM
        metadata.qkv = metadata.keys = None
        values = qkv if isinstance(qkv, Tensor) else qkv.values
        if metadata.whole and isinstance(qkv, Tensor) and self.takes_whole(spec, qkv, cache):
            metadata.qkv = qkv
            metadata.keys = qkv.new_empty(qkv.shape[0], spec.num_kv_heads, spec.head_dim)
        given = (*norm, rotation, metadata.batch.slot_mapping, cache, spec.num_heads, qkv.dtype)
        return prepare_qkv(values, *given, metadata.keys, self.heads_per_program)

    def write_parts(
        self,
        spec: AttentionSpec,
        qkv: Parts,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, TritonMetadata)
        assert not metadata.whole, "products of so many tokens are never in parts"
        return self.write(spec, qkv, head_norm, rotation, cache, metadata)

    def takes_whole(self, spec: AttentionSpec, qkv: Tensor, cache: Tensor) -> bool:
        """Whether long prompts without a cached prefix attend over the keys and values of their step."""
        return is_plain(spec)

    def attend(self, spec: AttentionSpec, query: Tensor, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert isinstance(metadata, TritonMetadata)
        batch = metadata.batch
        plain = is_plain(spec)
        if plain and metadata.whole == [(0, query.shape[0])]:
            return _whole_prompt(spec, query, metadata, 0)
        out = torch.empty(query.shape[0], spec.num_heads * spec.head_dim, dtype=query.dtype, device=query.device)
        scale, soft_cap, window = spec.scale, spec.soft_cap, spec.sliding_window
        shared = (batch.rows, batch.contexts, batch.query_starts)
        singles, few = metadata.singles, metadata.few
        programs, fit = singles[0].shape[0] * spec.num_kv_heads, heads_fit(spec.head_dim, query.element_size())
        one_each = metadata.alike and _fills(programs)
        if metadata.line is not None and window is None and fit and not one_each:
            even_attention(query, cache, metadata.line, out, scale, soft_cap, 2 * multiprocessors())
            return out
        if programs:
            splits, keys, stages = (1, 64, 3) if one_each else _choose_splits(programs, metadata.splits_for)
            if not fit:
                keys, stages = 64, 2
            given = (query, cache, batch.tables, *singles, *shared, out, scale, soft_cap, window)
            decode_attention(*given, splits=splits, keys=keys, num_stages=stages)
        if few[0].shape[0]:
            tile_attention(query, cache, batch.tables, *shared, *few, out, scale, soft_cap, window, _FEW)
        tiles = metadata.partial_tiles if plain else metadata.tiles
        if tiles[0].shape[0]:
            prefill_attention(query, cache, batch.tables, *shared, *tiles, out, scale, soft_cap, window)
        for start, length in metadata.whole if plain else ():
            part = query[start : start + length]
            out[start : start + length] = _whole_prompt(spec, part, metadata, start)
        return out


def is_plain(spec: AttentionSpec) -> bool:
    """Whether a query sees all keys before it, and scores are as they are."""
    return spec.soft_cap is None and spec.sliding_window is None


def _fills(programs: int) -> bool:
    """Whether programs of equal length, one a row and KV head, leave next to nothing of the device idle."""
    at_once = 4 * multiprocessors()  # so many of them fit
    return programs >= 0.9 * at_once * -(-programs // at_once) > 0


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


def keys_and_values(spec: AttentionSpec, metadata: TritonMetadata, span: slice) -> tuple[Tensor, Tensor]:
    """Those of some tokens of this step, as `write` left them: [n, KV heads, dim] each."""
    assert metadata.qkv is not None
    assert metadata.keys is not None
    first_value = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    values = metadata.qkv[span, first_value:].unflatten(-1, (spec.num_kv_heads, spec.head_dim))
    return metadata.keys[span], values


def _whole_prompt(spec: AttentionSpec, query: Tensor, metadata: TritonMetadata, start: int) -> Tensor:
    """Causal attention of a prompt over itself. query: [n, heads, dim], which begins at token `start`."""
    keys, values = keys_and_values(spec, metadata, slice(start, start + query.shape[0]))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True
        )
    return out[0].transpose(0, 1).reshape(query.shape[0], -1)
