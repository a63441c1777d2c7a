"""Small steps with prompts in them as graphs: the model's part is recorded once per number of tokens.

Launching a small prefill from the host takes longer than computing it. The inputs are copied into fixed buffers,
padded, and the recorded forward pass is replayed; sampling follows from the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.triton import MAX_FEW_ROWS, RecordedLists, TritonAttention, TritonMetadata
from quire.layers.attention import ForwardBatch
from quire.models.base import CausalLM
from quire.platform.recording import Recorder
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch
from quire.worker.request_rows import RequestRows

SIZES = (32, 64, 128, 256, 512, 768, 1024)
_EXTRA_TILES = 32  # prompts, beyond whole tiles, that a recorded step may hold


class _Buffers:
    """Fixed inputs of the step of one size."""

    def __init__(self, size: int, num_groups: int, scratch_row: int, device: torch.device) -> None:
        self.max_rows = min(size, scratch_row)
        self.max_tiles = size // 128 + min(_EXTRA_TILES, size)
        self.input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots = torch.zeros(num_groups, size, dtype=torch.int64, device=device)
        self.rows = torch.full((self.max_rows,), scratch_row, dtype=torch.int64, device=device)
        self.contexts = torch.ones(self.max_rows, dtype=torch.int32, device=device)
        self.query_starts = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=device)

        def empty_list(length: int) -> tuple[Tensor, Tensor]:
            both = torch.full((2, length), -1, dtype=torch.int32, device=device)
            return both[0], both[1]

        self.lists = RecordedLists(
            singles=empty_list(self.max_rows), few=empty_list(MAX_FEW_ROWS), tiles=empty_list(self.max_tiles)
        )

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


class MixedGraphs:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        assert isinstance(backend, TritonAttention)
        self._model, self._rows, self._tables, self._backend = model, rows, tables, backend
        self._max_model_len = max_model_len
        self._graphs: dict[tuple[int, tuple[bool, ...]], tuple[Callable[[], None], Tensor]] = {}
        self._buffers: dict[int, _Buffers] = {}
        self._recorder = Recorder()

    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states [size, hidden] of a step that fits a recorded size, else None. Valid until the next step."""
        count = batch.input_ids.shape[0]
        if count > SIZES[-1]:
            return None
        size = SIZES[bisect_left(SIZES, count)]
        metadata = [one for one in batch.forward.attention if isinstance(one, TritonMetadata)]
        if size not in self._buffers:
            device = self._tables.tables.device
            self._buffers[size] = _Buffers(size, self._tables.num_groups, self._rows.scratch_row, device)
        buffers = self._buffers[size]
        if batch.rows.shape[0] > buffers.max_rows or metadata[0].tiles[0].shape[0] > buffers.max_tiles:
            return None
        # A recording leaves out the kernels for kinds of rows that are not there.
        kinds = tuple(bool(pair[0].shape[0]) for pair in (metadata[0].singles, metadata[0].few, metadata[0].tiles))
        # Filled first: recording runs the step once, which must write keys and values where they belong.
        buffers.fill(batch, metadata)
        if (size, kinds) not in self._graphs:
            self._graphs[size, kinds] = self._record(buffers, kinds)
        replay, hidden = self._graphs[size, kinds]
        replay()
        return hidden

    def _record(self, buffers: _Buffers, kinds: tuple[bool, ...]) -> tuple[Callable[[], None], Tensor]:
        return self._recorder.record(lambda: self._forward(buffers, buffers.lists.only(kinds)))

    def _forward(self, buffers: _Buffers, lists: RecordedLists) -> Tensor:
        tables = self._tables
        attention = [
            self._backend.prepare_recorded(
                AttentionBatch(
                    query_lens=[],
                    context_lens=[],
                    tables=tables.tables[group],
                    rows=buffers.rows,
                    contexts=buffers.contexts,
                    query_starts=buffers.query_starts,
                    slot_mapping=buffers.slots[group],
                    block_size=tables.block_size,
                ),
                lists,
                self._max_model_len,
            )
            for group in range(tables.num_groups)
        ]
        hidden: Tensor = self._model(buffers.input_ids, buffers.positions, ForwardBatch(attention=list(attention)))
        return hidden


def _put(buffer: Tensor, values: Tensor, padding: int) -> None:
    buffer[: values.shape[0]] = values
    buffer[values.shape[0] :] = padding
