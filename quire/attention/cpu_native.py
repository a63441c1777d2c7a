"""Paged attention through the native CPU library: one call per layer for prefill and decode alike.

Arithmetic is float32; the cache may hold less. A query's keys are summed in tiles at absolute positions, so nothing
about the batch can change a bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionSpec,
    HeadNorm,
    LayerCache,
    Rotation,
    Written,
)
from quire.kernels.cpu import library
from quire.kernels.cpu.index import KV_TYPES
from quire.kernels.cpu.recording import KernelRecorder
from quire.kernels.cpu.tracing import empty
from quire.parallel.groups import ContextShare
from quire.platform.recording import SizedRecorder
from quire.types.ledger import EngineSizes, LedgerLine

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
    attended: int

    @property
    def rows_of_step(self) -> tuple[int, int, int, int]:
        return self.tables, self.rows, self.contexts, self.starts


class NativeAttention(AttentionBackend):
    name = "cpu_native"

    def __init__(self) -> None:
        self._kernels = library.bound()
        self._share = ContextShare()

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

    def share_context(self, share: ContextShare) -> None:
        self._share = share

    def contributes(self, spec: AttentionSpec, sizes: EngineSizes) -> Iterable[LedgerLine]:
        yield from super().contributes(spec, sizes)
        ranks = self._share.size
        if ranks > 1:
            width = ranks * spec.num_heads * ((spec.value_dim or spec.head_dim) + 2)
            num_bytes = sizes.max_num_batched_tokens * (2 + ranks) * width * 4
            yield LedgerLine("split contexts", num_bytes, f"queries and sums of {ranks} ranks", in_step=True)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return tuple(KV_TYPES)

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        # Within a cell of the last two dimensions the library arranges keys in its own way (kv_cache.h).
        width = head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim
        return (2, num_blocks, num_kv_heads, block_size // self._share.size, width)

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        # A thread's unpacked tile and query rows, and the tiles' results of one long decode.
        return library.num_threads() * (1 << 20) + max_model_len * spec.num_heads * (spec.head_dim + 18) // 2

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        if cache.dtype == torch.int8:
            blocks = cache[:, block_ids]
            cells = blocks.flatten(-2)
            first = cells.shape[-1] - SCALE_BYTES * blocks.shape[-2]
            scales = cells[..., first:].contiguous().view(torch.float32)
            cells[..., first:] = scales.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(torch.int8)
            cache[:, block_ids] = cells.view(blocks.shape)
        else:
            super().heal(cache, block_ids)

    def note_finite(self, values: Tensor, out: Tensor) -> None:
        self._kernels.note_finite(values.data_ptr(), *values.shape, values.stride(0), out.data_ptr())

    def prepare(self, batch: AttentionBatch, kind: Hashable, lists: tuple[Tensor, ...]) -> NativeMetadata:
        share, slots = self._share, batch.slot_mapping
        if share.size > 1:
            own, size = empty(slots.shape[0], dtype=torch.int64), batch.block_size // share.size
            place = (slots.shape[0], share.size, share.rank, size)
            self._kernels.own_slots(slots.data_ptr(), own.data_ptr(), *place)
            batch = replace(batch, slot_mapping=own, block_size=size)
        return NativeMetadata(
            batch,
            batch.slot_mapping.data_ptr(),
            batch.tables.data_ptr(),
            batch.rows.data_ptr(),
            batch.contexts.data_ptr(),
            batch.query_starts.data_ptr(),
            (batch.contexts if batch.attended is None else batch.attended).data_ptr(),
        )

    def write(self, at: LayerCache, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation) -> Written:
        spec, cache, metadata = at
        assert isinstance(metadata, NativeMetadata)
        qkv = qkv.contiguous()
        tokens = qkv.shape[0]
        q = empty(tokens, spec.num_heads, spec.head_dim)
        norms: tuple[int | None, int | None] = (None, None)
        eps = offset = 0.0
        if head_norm is not None:
            norms = head_norm.q_weight.data_ptr(), head_norm.k_weight.data_ptr()
            eps, offset = head_norm.eps, head_norm.weight_offset
        given = (qkv.data_ptr(), *norms, *rotation_addresses(rotation), metadata.slots)
        rotary = 0 if rotation is None else rotation[0].shape[-1]
        sizes = (tokens, metadata.batch.num_tokens, spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary)
        kept = (metadata.batch.block_size, cache.stride(0) * cache.element_size(), KV_TYPES[cache.dtype])
        kind = (eps, offset, int(spec.norms_rotated), *spec.kv_scales)
        self._kernels.prepare_qkv(*given, q.data_ptr(), cache.data_ptr(), *sizes, *kept, *kind)
        return Written(q)

    def attend(self, at: LayerCache, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, NativeMetadata)
        batch, share = metadata.batch, self._share
        query, out = self._all_queries(written.query), self._room(written.query, spec.head_dim)
        sinks = None if spec.sinks is None else spec.sinks.data_ptr()
        given = (query.data_ptr(), cache.data_ptr(), *metadata.rows_of_step, out.data_ptr())
        strides = (batch.rows.shape[0], batch.tables.stride(0), cache.stride(0) * cache.element_size())
        heads = (share.size * spec.num_heads, spec.num_kv_heads, spec.head_dim)
        seen = (batch.block_size, spec.kernel_window, int(spec.causal), KV_TYPES[cache.dtype])
        scores = (spec.scale * spec.kv_scales[0], spec.soft_cap or 0.0, sinks)
        place = (share.size, share.rank, spec.kv_scales[1], metadata.attended)
        self._kernels.attention(*given, *strides, *heads, *seen, *scores, *place)
        out = self._merged(out, spec.num_heads, spec.head_dim, sinks).flatten(1)
        if out.shape[0] > batch.num_tokens:
            out[batch.num_tokens :] = 0.0
        return out

    def _all_queries(self, query: Tensor) -> Tensor:
        """Those of this rank's heads [n, heads, dim] among those of all ranks that split its contexts."""
        flat = query.flatten(1)
        return self._share.collectives.all_gather(flat, self._share.size * flat.shape[1])

    def _room(self, query: Tensor, value_dim: int) -> Tensor:
        """For what attention gives: results [n, heads, value_dim], or states of all ranks' heads that are merged."""
        ranks, (tokens, heads, _) = self._share.size, query.shape
        return empty(tokens, heads, value_dim) if ranks == 1 else empty(tokens, ranks * heads * (value_dim + 2))

    def _merged(self, states: Tensor, heads: int, value_dim: int, sinks: int | None) -> Tensor:
        """Results [n, heads, value_dim], of the states of all ranks that split contexts."""
        share, tokens = self._share, states.shape[0]
        if share.size == 1:
            return states
        everyone = share.collectives.all_gather(states, share.size * states.shape[1])
        out = empty(tokens, heads, value_dim)
        place = (tokens, share.size, share.size * heads, share.rank * heads, heads, value_dim)
        self._kernels.merge_contexts(everyone.data_ptr(), sinks, out.data_ptr(), *place)
        return out


def rotation_addresses(rotation: Rotation) -> tuple[int | None, int | None]:
    return (None, None) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr())
