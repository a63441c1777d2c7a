"""The forward pass of any step, recorded once when the engine starts and replayed, on backends that can record.

The inputs are copied into fixed buffers; sampling follows as in any other step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch, AttentionMetadata
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.models.base import CausalLM
from quire.platform.recording import NotRecordableError, SizedRecorder, SizedRecording
from quire.utils.log import get_logger
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch

logger = get_logger(__name__)

# Numbers of tokens, of rows and of wanted tokens: the step is recorded at the first three, then a replay is compared
# with it at the last.
TRIALS = ((4, 2, 1), (7, 3, 3), (12, 2, 4))
CHECK = (10, 4, 3)
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
        tokens, rows = max(max_tokens, MOST_TOKENS), max(max_rows, MOST_ROWS)
        self._limits = (tokens, rows, rows)
        self._input_ids = torch.zeros(tokens, dtype=torch.int64)
        self._positions = torch.zeros(tokens, dtype=torch.int64)
        self._slots = torch.zeros(tables.num_groups, tokens, dtype=torch.int64)
        self._rows = torch.zeros(rows, dtype=torch.int64)
        self._contexts = torch.zeros(rows, dtype=torch.int32)
        self._starts = torch.zeros(rows + 1, dtype=torch.int32)
        self._finite = torch.zeros(tokens, dtype=torch.bool)
        # Of the wanted tokens, each of which is a row of its own to the last layer's attention.
        self._wanted_tokens = torch.zeros(rows, dtype=torch.int64)
        self._wanted_rows = torch.zeros(rows, dtype=torch.int64)
        self._wanted_contexts = torch.zeros(rows, dtype=torch.int32)
        self._wanted_starts = torch.arange(rows + 1, dtype=torch.int32)
        self._recording: SizedRecording | None = None
        try:
            self._recording = self._record(recorder)
        except NotRecordableError as error:
            logger.info("steps are not recorded: the model %s", error)

    @property
    def is_recorded(self) -> bool:
        return self._recording is not None

    def run(self, batch: InputBatch) -> Tensor | None:
        """Hidden states of the wanted tokens if there is a recording for such steps, else None.

        [num_wanted, hidden], valid until the next step.
        """
        count, num_rows = batch.input_ids.shape[0], batch.rows.shape[0]
        wanted, wanted_group = batch.forward.wanted, batch.wanted_group
        is_padded = count != sum(batch.groups[0].query_lens)
        if self._recording is None or is_padded or wanted is None or wanted_group is None:
            return None
        num_wanted = wanted.tokens.shape[0]
        if num_wanted > self._limits[2]:
            return None
        self._input_ids[:count] = batch.input_ids
        self._positions[:count] = batch.positions
        self._rows[:num_rows] = batch.rows
        self._contexts[:num_rows] = batch.groups[0].contexts
        self._starts[: num_rows + 1] = batch.groups[0].query_starts
        for group, one in enumerate(batch.groups):
            self._slots[group, :count] = one.slot_mapping
        self._wanted_tokens[:num_wanted] = wanted.tokens
        self._wanted_rows[:num_wanted] = wanted_group.rows
        self._wanted_contexts[:num_wanted] = wanted_group.contexts
        self._recording(count, num_rows, num_wanted)
        wanted.finite.copy_(self._finite[:count])
        return self._recording.results[0][:num_wanted]

    @torch.inference_mode()
    def _record(self, recorder: SizedRecorder) -> SizedRecording:
        with self._borrowed_blocks():
            self._fill(seed=0)
            recording = recorder.record(self._step, TRIALS, self._limits)
            self._fill(seed=1)
            (expected,) = self._step(*CHECK)
            recording(*CHECK)
            if not torch.equal(recording.results[0][: len(expected)], expected):
                raise NotRecordableError("does more than call kernels")
        return recording

    def _step(self, num_tokens: int, num_rows: int, num_wanted: int) -> list[Tensor]:
        """The model on what the buffers hold. In trials the first row has all tokens but one for each other row."""
        query_lens = [num_tokens - num_rows + 1] + [1] * (num_rows - 1)
        starts = [0, *range(num_tokens - num_rows + 1, num_tokens + 1)]
        self._starts[: num_rows + 1] = torch.tensor(starts, dtype=torch.int32)
        attention = self._prepare(
            query_lens, self._rows[:num_rows], self._contexts, self._starts, self._slots[:, :num_tokens]
        )
        of_wanted = self._prepare(
            [1] * num_wanted,
            self._wanted_rows[:num_wanted],
            self._wanted_contexts,
            self._wanted_starts,
            self._slots[:, :0],  # nothing is written
        )
        wanted = WantedTokens(self._wanted_tokens[:num_wanted], of_wanted, self._finite[:num_tokens])
        batch = ForwardBatch(attention, wanted)
        return [self._model(self._input_ids[:num_tokens], self._positions[:num_tokens], batch)]

    def _prepare(
        self, query_lens: list[int], rows: Tensor, contexts: Tensor, starts: Tensor, slots: Tensor
    ) -> list[AttentionMetadata]:
        count = len(query_lens)
        return [
            self._backend.prepare(
                AttentionBatch(
                    query_lens=query_lens,
                    context_lens=[],
                    tables=self._tables.tables[group],
                    rows=rows,
                    contexts=contexts[:count],
                    query_starts=starts[: count + 1],
                    slot_mapping=slots[group],
                    block_size=self._tables.block_size,
                )
            )
            for group in range(self._tables.num_groups)
        ]

    def _fill(self, seed: int) -> None:
        """Tokens that are nobody's, each with a slot of its own. All rows read the same blocks."""
        index = torch.arange(MOST_TOKENS)
        self._input_ids[:MOST_TOKENS] = index + seed
        self._positions[:MOST_TOKENS] = (index * 5 + seed) % MOST_TOKENS
        self._slots[:, :MOST_TOKENS] = self._tables.block_size + index
        self._rows[:MOST_ROWS] = 0
        self._contexts[:MOST_ROWS] = MOST_TOKENS
        self._wanted_tokens[:MOST_ROWS] = (index[:MOST_ROWS] + seed) % MOST_ROWS
        self._wanted_rows[:MOST_ROWS] = 0
        self._wanted_contexts[:MOST_ROWS] = MOST_TOKENS - index[:MOST_ROWS].to(torch.int32)

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
