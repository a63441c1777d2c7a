"""The forward pass of any step, recorded once when the engine starts and replayed, on backends that can record.

The inputs are copied into fixed buffers; sampling follows as in any other step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.layers.attention import ForwardBatch
from quire.models.base import CausalLM
from quire.platform.recording import NotRecordableError, SizedRecorder, SizedRecording
from quire.utils.log import get_logger
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch

logger = get_logger(__name__)

# Numbers of tokens and rows: the step is recorded at the first three, then a replay is compared with it at the last.
TRIALS = ((2, 1), (7, 3), (12, 2))
CHECK = (10, 4)
MOST_TOKENS, MOST_ROWS = 12, 4


class RecordedForward:
    def __init__(
        self,
        model: CausalLM,
        tables: BlockTables,
        backend: AttentionBackend,
        recorder: SizedRecorder,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        """`tables` must have no rows in use yet, and the cache room for MOST_TOKENS."""
        self._model, self._tables, self._backend = model, tables, backend
        tokens, rows = self._limits = max(max_tokens, MOST_TOKENS), max(max_rows, MOST_ROWS)
        self._input_ids = torch.zeros(tokens, dtype=torch.int64)
        self._positions = torch.zeros(tokens, dtype=torch.int64)
        self._slots = torch.zeros(tables.num_groups, tokens, dtype=torch.int64)
        self._rows = torch.zeros(rows, dtype=torch.int64)
        self._contexts = torch.zeros(rows, dtype=torch.int32)
        self._starts = torch.zeros(rows + 1, dtype=torch.int32)
        self._recording: SizedRecording | None = None
        try:
            self._recording = self._record(recorder)
        except NotRecordableError as error:
            logger.info("steps are not recorded: the model %s", error)

    @property
    def is_recorded(self) -> bool:
        return self._recording is not None

    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states [num_tokens, hidden] if there is a recording, else None. Valid until the next step."""
        count, num_rows = batch.input_ids.shape[0], batch.rows.shape[0]
        is_padded = count != sum(batch.groups[0].query_lens)
        if self._recording is None or is_padded or batch.forward.wanted is not None:
            return None
        self._input_ids[:count] = batch.input_ids
        self._positions[:count] = batch.positions
        self._rows[:num_rows] = batch.rows
        self._contexts[:num_rows] = batch.groups[0].contexts
        self._starts[: num_rows + 1] = batch.groups[0].query_starts
        for group, one in enumerate(batch.groups):
            self._slots[group, :count] = one.slot_mapping
        self._recording(count, num_rows)
        return self._recording.results[0][:count]

    @torch.inference_mode()
    def _record(self, recorder: SizedRecorder) -> SizedRecording:
        with self._borrowed_blocks():
            self._fill(seed=0)
            recording = recorder.record(self._step, TRIALS, self._limits)
            self._fill(seed=1)
            (expected,) = self._step(*CHECK)
            recording(*CHECK)
            if not torch.equal(recording.results[0][: CHECK[0]], expected):
                raise NotRecordableError("does more than call kernels")
        return recording

    def _step(self, num_tokens: int, num_rows: int) -> list[Tensor]:
        """The model on what the buffers hold. In trials the first row has all tokens but one for each other row."""
        query_lens = [num_tokens - num_rows + 1] + [1] * (num_rows - 1)
        starts = [0, *range(num_tokens - num_rows + 1, num_tokens + 1)]
        self._starts[: num_rows + 1] = torch.tensor(starts, dtype=torch.int32)
        attention = [
            self._backend.prepare(
                AttentionBatch(
                    query_lens=query_lens,
                    context_lens=[],
                    tables=self._tables.tables[group],
                    rows=self._rows[:num_rows],
                    contexts=self._contexts[:num_rows],
                    query_starts=self._starts[: num_rows + 1],
                    slot_mapping=self._slots[group, :num_tokens],
                    block_size=self._tables.block_size,
                )
            )
            for group in range(self._tables.num_groups)
        ]
        return [self._model(self._input_ids[:num_tokens], self._positions[:num_tokens], ForwardBatch(attention))]

    def _fill(self, seed: int) -> None:
        """Tokens that are nobody's, each with a slot of its own. All rows read the same blocks."""
        index = torch.arange(MOST_TOKENS)
        self._input_ids[:MOST_TOKENS] = index + seed
        self._positions[:MOST_TOKENS] = (index * 5 + seed) % MOST_TOKENS
        self._slots[:, :MOST_TOKENS] = self._tables.block_size + index
        self._rows[:MOST_ROWS] = 0
        self._contexts[:MOST_ROWS] = MOST_TOKENS

    @contextmanager
    def _borrowed_blocks(self) -> Iterator[None]:
        """Give row 0 the first blocks, as many as the trials' tokens take, and leave nothing harmful in them."""
        blocks = 1 + torch.arange(-(-MOST_TOKENS // self._tables.block_size))
        table = self._tables.tables[:, 0, : len(blocks)]
        table[:] = blocks
        try:
            yield
        finally:
            table.zero_()
            for layer in self._model.attention_layers():
                layer.backend.heal(layer.cache, blocks)
