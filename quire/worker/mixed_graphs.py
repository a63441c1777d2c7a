"""Steps with prompts in them as graphs: the model's part is recorded once per number of tokens.

Launching a small prefill from the host takes longer than computing it, and of a small model even a large one.
The inputs are copied into fixed buffers, padded, and the recorded forward pass is replayed; sampling follows from
the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.triton import MAX_FEW_ROWS, RecordedLists, TritonAttention, TritonMetadata
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.models.base import CausalLM
from quire.platform.recording import Recorder
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch
from quire.worker.request_rows import RequestRows

SIZES = (32, 64, 128, 256, 512, 768, 1024)
# A full step is recorded too where computing it, at so many multiplications, may be faster than launching it.
_LAUNCH_BOUND = 8e12
_FULL = 15 / 16  # a step of at least this part of it is padded to the full one
_EXTRA_TILES = 32  # prompts, beyond whole tiles, that a recorded step may hold


class _Kinds(NamedTuple):
    """Which kinds of rows a recorded step has kernels for."""

    singles: bool
    few: bool
    tiles: bool
    whole: bool  # the step is one whole prompt, or the first part of a longer one


class _Buffers:
    """Fixed inputs of the step of one size."""

    def __init__(self, size: int, tables: BlockTables, scratch_row: int, *, narrow: bool) -> None:
        device = tables.tables.device
        self.max_rows = min(size, scratch_row)
        self.max_tiles = size // 128 + min(max(_EXTRA_TILES, size // 128), size)
        self.input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots = torch.zeros(tables.num_groups, size, dtype=torch.int64, device=device)
        self.rows = torch.full((self.max_rows,), scratch_row, dtype=torch.int64, device=device)
        self.contexts = torch.ones(self.max_rows, dtype=torch.int32, device=device)
        self.query_starts = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=device)

        def empty_list(length: int) -> tuple[Tensor, Tensor]:
            both = torch.full((2, length), -1, dtype=torch.int32, device=device)
            return both[0], both[1]

        self.lists = RecordedLists(
            singles=empty_list(self.max_rows), few=empty_list(MAX_FEW_ROWS), tiles=empty_list(self.max_tiles)
        )
        self.wanted = _WantedBuffers(size, self.max_rows, scratch_row, device) if narrow else None

    def fill(self, batch: InputBatch, metadata: list[TritonMetadata]) -> None:
        count, num_rows = batch.input_ids.shape[0], batch.rows.shape[0]
        first = metadata[0]
        _put(self.input_ids, batch.input_ids, 0)
        _put(self.positions, batch.positions, 0)
        for group, one in enumerate(metadata):
            self.slots[group, :count] = one.batch.slot_mapping
            self.slots[group, count:] = 0
        self.rows[:num_rows] = batch.rows
        self.contexts[:num_rows] = first.batch.contexts
        self.query_starts[: num_rows + 1] = first.batch.query_starts
        pairs = ((self.lists.singles, first.singles), (self.lists.few, first.few), (self.lists.tiles, first.tiles))
        for buffers, lists in pairs:
            for buffer, values in zip(buffers, lists, strict=True):
                _put(buffer, values, -1)
        if self.wanted is not None and batch.forward.wanted is not None:
            self.wanted.fill(batch.forward.wanted)


class _WantedBuffers:
    """The same for the tokens that the last layer computes; there are as many as there can be rows."""

    def __init__(self, size: int, max_rows: int, scratch_row: int, device: torch.device) -> None:
        self._scratch_row = scratch_row
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.rows = torch.full((max_rows,), scratch_row, dtype=torch.int64, device=device)
        self.contexts = torch.ones(max_rows, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.finite = torch.ones(size, dtype=torch.bool, device=device)

    def fill(self, wanted: WantedTokens) -> None:
        (first, *_) = wanted.attention
        assert isinstance(first, TritonMetadata)
        _put(self.tokens, wanted.tokens, 0)
        _put(self.rows, first.batch.rows, self._scratch_row)
        _put(self.contexts, first.batch.contexts, 1)


class MixedGraphs:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        """`max_tokens` is the size of a full step."""
        assert isinstance(backend, TritonAttention)
        self._model, self._rows, self._tables, self._backend = model, rows, tables, backend
        self._max_model_len = max_model_len
        weights = sum(parameter.numel() for parameter in model.parameters())
        is_launch_bound = max_tokens > SIZES[-1] and max_tokens * weights <= _LAUNCH_BOUND
        self._full_size = max_tokens if is_launch_bound else None
        self._graphs: dict[tuple[int, _Kinds], tuple[Callable[[], None], Tensor]] = {}
        self._buffers: dict[int, _Buffers] = {}
        self._recorder = Recorder()

    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states [size, hidden] of a step that fits a recorded size, else None. Valid until the next step.

        Where only some tokens are wanted, [max_rows, hidden].
        """
        size = self._size(batch)
        metadata = [one for one in batch.forward.attention if isinstance(one, TritonMetadata)]
        if size is None or metadata[0].whole not in ([], [(0, size)]):
            return None
        if size not in self._buffers:
            self._buffers[size] = _Buffers(
                size, self._tables, self._rows.scratch_row, narrow=batch.forward.wanted is not None
            )
        buffers = self._buffers[size]
        if batch.rows.shape[0] > buffers.max_rows or metadata[0].tiles[0].shape[0] > buffers.max_tiles:
            return None
        # A recording leaves out the kernels for kinds of rows that are not there.
        first = metadata[0]
        singles, few, tiles = (bool(pair[0].shape[0]) for pair in (first.singles, first.few, first.tiles))
        kinds = _Kinds(singles, few, tiles, bool(first.whole))
        # Filled first: recording runs the step once, which must write keys and values where they belong.
        buffers.fill(batch, metadata)
        if (size, kinds) not in self._graphs:
            self._graphs[size, kinds] = self._record(buffers, kinds)
        replay, hidden = self._graphs[size, kinds]
        replay()
        if batch.forward.wanted is not None and buffers.wanted is not None:
            finite = batch.forward.wanted.finite
            finite.copy_(buffers.wanted.finite[: finite.shape[0]])
        return hidden

    def _size(self, batch: InputBatch) -> int | None:
        """Which recorded size this step is padded to. Those of SIZES compute all tokens, the full one the wanted."""
        count, is_narrow = batch.input_ids.shape[0], batch.forward.wanted is not None
        if count <= SIZES[-1]:
            return None if is_narrow else SIZES[bisect_left(SIZES, count)]
        full = self._full_size
        return full if full is not None and is_narrow and _FULL * full <= count <= full else None

    def _record(self, buffers: _Buffers, kinds: _Kinds) -> tuple[Callable[[], None], Tensor]:
        return self._recorder.record(lambda: self._forward(buffers, kinds))

    def _forward(self, buffers: _Buffers, kinds: _Kinds) -> Tensor:
        lists = buffers.lists.only(kinds[:3])
        whole = [(0, buffers.input_ids.shape[0])] if kinds.whole else []
        attention = [
            self._backend.prepare_recorded(
                self._batch(group, buffers.rows, buffers.contexts, buffers.query_starts, buffers.slots[group]),
                lists,
                self._max_model_len,
                whole,
            )
            for group in range(self._tables.num_groups)
        ]
        batch = ForwardBatch(list(attention), self._wanted(buffers))
        hidden: Tensor = self._model(buffers.input_ids, buffers.positions, batch)
        return hidden

    def _wanted(self, buffers: _Buffers) -> WantedTokens | None:
        wanted = buffers.wanted
        if wanted is None:
            return None
        attention = [
            self._backend.prepare_decode(
                self._batch(group, wanted.rows, wanted.contexts, wanted.query_starts, wanted.tokens[:0]),
                self._max_model_len,
                self._rows.scratch_row,
                alike=False,
            )
            for group in range(self._tables.num_groups)
        ]
        return WantedTokens(wanted.tokens, list(attention), wanted.finite)

    def _batch(
        self, group: int, rows: Tensor, contexts: Tensor, query_starts: Tensor, slots: Tensor
    ) -> AttentionBatch:
        return AttentionBatch(
            query_lens=[],
            context_lens=[],
            tables=self._tables.tables[group],
            rows=rows,
            contexts=contexts,
            query_starts=query_starts,
            slot_mapping=slots,
            block_size=self._tables.block_size,
        )


def _put(buffer: Tensor, values: Tensor, padding: int) -> None:
    buffer[: values.shape[0]] = values
    buffer[values.shape[0] :] = padding
