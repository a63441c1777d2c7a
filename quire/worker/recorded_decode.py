"""Whole decode steps, recorded once when the engine starts and replayed, on backends that can record.

A replay reads rows, positions and tables where they stand, feeds each row's last token to the model, appends the next
token, the likeliest or one that is drawn, and advances the row. It needs nothing but, when the batch has changed, its
list of rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.kernels.cpu.step import append_chosen, draw_by_row, gather_inputs
from quire.layers.attention import ForwardBatch
from quire.models.base import CausalLM
from quire.platform.recording import NotRecordableError, SizedRecorder, SizedRecording
from quire.types.step import StepPlan
from quire.utils.log import get_logger
from quire.worker.block_tables import BlockTables
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.sampler import RecordedKind, Sampler

logger = get_logger(__name__)

# Numbers of rows: the step is recorded at the first two, then a replay is compared with it at the last.
TRIALS = ((2,), (5,))
CHECK = 3
MOST_ROWS = 5


class Arrived:
    """What a replay left, until the next one."""

    __slots__ = ("_values",)

    def __init__(self, values: NDArray[np.int32]) -> None:
        self._values = values

    def get(self) -> NDArray[np.int32]:
        return self._values


class RecordedDecode:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        recorder: SizedRecorder,
        sampler: Sampler,
        max_rows: int,
    ) -> None:
        assert sampler.draw_table is not None, "what can record has kernels, and so has the draw"
        self._sampler, self._draw_parameters = sampler, sampler.draw_table.parameters
        self._model, self._rows, self._tables, self._backend = model, rows, tables, backend
        limit = max(max_rows, MOST_ROWS)
        self._row_buffer = torch.full((limit,), rows.scratch_row, dtype=torch.int64)
        self._row_array = self._row_buffer.numpy()
        self._starts = torch.arange(limit + 1, dtype=torch.int32)
        self._loaded: list[int] = []  # what the buffer holds
        self._recording: SizedRecording | None = None
        try:
            self._recording = self._record(recorder, limit)
            self._results = self._recording.results[0].numpy().T
        except NotRecordableError as error:
            logger.info("decode steps are not recorded whole: the model %s", error)

    @property
    def is_recorded(self) -> bool:
        return self._recording is not None

    def record_next(self) -> bool:
        """All there is was recorded at the start."""
        return False

    def takes(self, plan: StepPlan) -> bool:
        """Whether every row computes its one last known token, and not a token of a prompt with more to follow.

        And whether all rows take the likeliest token or draw one, and nothing shapes their logits.
        """
        if self._recording is None or sum(plan.num_tokens) != len(plan.rows):
            return False
        kind = self._sampler.recorded_kind(plan.rows, bool(plan.mask_slots))
        if kind is None or kind != RecordedKind(draws=kind.draws):
            return False
        computed, known = self._rows.host_num_computed, self._rows.host_num_tokens
        return all(computed[row] + 1 == known[row] for row in plan.rows)

    def run(self, plan: StepPlan) -> Arrived:
        """Replay; the result is [2, n] int32: tokens, and 1 where logits were not finite. Runs no op of torch."""
        assert self._recording is not None, "takes() is False"
        count = len(plan.rows)
        if plan.rows != self._loaded:
            self._row_array[:count] = plan.rows
            self._loaded = list(plan.rows)
        self._recording(count)
        return Arrived(self._results[:, :count])

    @torch.inference_mode()
    def _record(self, recorder: SizedRecorder, limit: int) -> SizedRecording:
        """On rows that belong to nobody, so that no request changes."""
        scratch_token = self._rows.token_ids[self._rows.scratch_row, :1]
        try:
            recording = recorder.record(self._step, TRIALS, (limit,))
            scratch_token.fill_(1)
            expected = self._step(CHECK)
            recording(CHECK)
            for result, wanted in zip(recording.results, expected, strict=True):
                if not torch.equal(result[:CHECK], wanted):
                    raise NotRecordableError("does more than call kernels")
        finally:
            scratch_token.zero_()
            for layer in self._model.attention_layers():  # keys and values went to the null block
                layer.backend.heal(layer.cache, torch.zeros(1, dtype=torch.int64))
        return recording

    def _step(self, count: int) -> list[Tensor]:
        state, tables, rows = self._rows, self._tables, self._row_buffer[:count]
        input_ids, positions, contexts, slots = gather_inputs(
            rows, state.token_ids, state.num_computed, tables.tables, tables.block_size
        )
        attention = [
            self._backend.prepare(
                AttentionBatch(
                    query_lens=[1] * count,
                    context_lens=[],
                    tables=tables.tables[group],
                    rows=rows,
                    contexts=contexts,
                    query_starts=self._starts[: count + 1],
                    slot_mapping=slots[group],
                    block_size=tables.block_size,
                )
            )
            for group in range(tables.num_groups)
        ]
        logits = self._model.compute_logits(self._model(input_ids, positions, ForwardBatch(attention)))
        tokens, highest = draw_by_row(
            logits, rows, self._draw_parameters, state.seeds, state.num_tokens, state.num_prompt_tokens
        )
        place = (rows, state.token_ids, state.num_tokens, state.num_computed, state.scratch_row)
        return [append_chosen(tokens, highest, *place), logits]
