"""Decode steps whose forward pass is recorded once per number of rows and replayed, on backends that can record.

The inputs are copied into fixed buffers; sampling follows as in any other step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.layers.attention import ForwardBatch
from quire.models.base import CausalLM
from quire.platform.recording import ForwardRecorder, NotRecordableError
from quire.utils.log import get_logger
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch
from quire.worker.request_rows import RequestRows

logger = get_logger(__name__)

# With more rows the kernels take so long that what surrounds them does not matter.
MAX_ROWS = 32


class _Recording:
    """The forward pass of one number of rows."""

    def __init__(self, num_rows: int, num_groups: int, scratch_row: int) -> None:
        self._scratch_row = scratch_row
        self.input_ids = torch.zeros(num_rows, dtype=torch.int64)
        self.positions = torch.zeros(num_rows, dtype=torch.int64)
        self.rows = torch.zeros(num_rows, dtype=torch.int64)
        self.contexts = torch.zeros(num_rows, dtype=torch.int32)
        self.starts = torch.arange(num_rows + 1, dtype=torch.int32)
        self.slots = torch.zeros(num_groups, num_rows, dtype=torch.int64)
        self.replay: Callable[[], None]
        self.hidden: Tensor

    def fill(self, batch: InputBatch) -> None:
        self.input_ids.copy_(batch.input_ids)
        self.positions.copy_(batch.positions)
        self.rows.copy_(batch.rows)
        self.contexts.copy_(batch.groups[0].contexts)
        for group, one in enumerate(batch.groups):
            self.slots[group].copy_(one.slot_mapping)

    def record(
        self, model: CausalLM, tables: BlockTables, backend: AttentionBackend, recorder: ForwardRecorder
    ) -> None:
        """Record a step over nobody's tokens; on others like them a replay must then give what the model gives."""
        num_rows = len(self.rows)
        forward = ForwardBatch(
            attention=[
                backend.prepare(
                    AttentionBatch(
                        query_lens=[1] * num_rows,
                        context_lens=[],
                        tables=tables.tables[group],
                        rows=self.rows,
                        contexts=self.contexts,
                        query_starts=self.starts,
                        slot_mapping=self.slots[group],
                        block_size=tables.block_size,
                    )
                )
                for group in range(tables.num_groups)
            ]
        )

        def step() -> Tensor:
            hidden: Tensor = model(self.input_ids, self.positions, forward)
            return hidden

        self._fill_with(0)
        self.replay, self.hidden = recorder.record(step)
        self._fill_with(1)
        expected = step()
        self.replay()
        if not torch.equal(self.hidden, expected):
            raise NotRecordableError("does more than call kernels")

    def _fill_with(self, value: int) -> None:
        """Token `value` at position `value`, whose key and value go to the null block."""
        self.input_ids.fill_(value)
        self.positions.fill_(value)
        self.rows.fill_(self._scratch_row)
        self.contexts.fill_(1)
        self.slots.zero_()


class RecordedDecode:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        recorder: ForwardRecorder,
    ) -> None:
        self._model, self._rows, self._tables = model, rows, tables
        self._backend, self._recorder = backend, recorder
        self._recordings: dict[int, _Recording] = {}
        self._is_recordable = True

    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states [num_rows, hidden] if each row computes one token, else None. Valid until the next step."""
        num_rows = batch.rows.shape[0]
        if num_rows > MAX_ROWS or batch.input_ids.shape[0] != num_rows or not self._is_recordable:
            return None
        recording = self._recordings.get(num_rows) or self._record(num_rows)
        if recording is None:
            return None
        recording.fill(batch)
        recording.replay()
        return recording.hidden

    def _record(self, num_rows: int) -> _Recording | None:
        recording = _Recording(num_rows, self._tables.num_groups, self._rows.scratch_row)
        try:
            recording.record(self._model, self._tables, self._backend, self._recorder)
        except NotRecordableError as error:
            logger.info("decode steps are not recorded: the model %s", error)
            self._is_recordable = False
            return None
        self._recordings[num_rows] = recording
        return recording
