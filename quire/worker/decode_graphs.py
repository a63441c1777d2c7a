"""Decode steps as graphs: recorded once per batch size, then replayed without the host.

A graph reads rows, positions and tables where they stand on the device, feeds each row's last token to the model,
appends the next token, the likeliest or one that is drawn, and advances the row. So a replay needs nothing from the
host but, when the batch has changed, its list of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.triton import TritonAttention
from quire.kernels.triton.sampling import draw_within
from quire.kernels.triton.step import append_chosen, append_likeliest, gather_inputs
from quire.layers.attention import ForwardBatch
from quire.models.base import CausalLM
from quire.platform.recording import Recorder
from quire.platform.transfer import Download, upload
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import output_lengths
from quire.worker.sampling.sampler import Sampler

# From this many rows on, and where the longest is this many times the mean, attention is shared evenly.
_MIN_EVEN_ROWS = 32
_UNEVEN = 1.15


class _Kind(NamedTuple):
    """What a recording is made for."""

    size: int
    uneven: bool  # contexts differ much
    draws: bool  # some rows do not just take the likeliest token


class DecodeGraphs:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        sampler: Sampler,
        sizes: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        assert isinstance(backend, TritonAttention)
        self._sampler = sampler
        self._model, self._rows, self._tables, self._backend = model, rows, tables, backend
        self._sizes = sizes
        self._max_model_len = max_model_len
        self._row_buffer = torch.full((sizes[-1],), rows.scratch_row, dtype=torch.int64, device=tables.tables.device)
        self._graphs: dict[_Kind, tuple[Callable[[], None], Tensor]] = {}
        self._recorder = Recorder()
        self._loaded: list[int] = []  # what the buffer holds, and for which kind
        self._loaded_kind: _Kind | None = None

    def takes(self, plan: StepPlan) -> bool:
        """Whether a recorded size can hold this step and every row computes its one last known token.

        A single token may also be the end or the whole of a chunk, after which more of the prompt follows.
        """
        if len(plan.rows) > self._sizes[-1] or sum(plan.num_tokens) != len(plan.rows):
            return False
        computed, known = self._rows.host_num_computed, self._rows.host_num_tokens
        return all(computed[row] + 1 == known[row] for row in plan.rows)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Download:
        """Replay; the result, once it has arrived, is [2, size] int32: tokens, and 1 where logits were not finite."""
        draws = not self._sampler.all_plain(plan.rows)
        if self._loaded_kind is None or plan.rows != self._loaded or self._loaded_kind.draws != draws:
            self._load(plan, draws)
        assert self._loaded_kind is not None
        replay, out = self._graphs[self._loaded_kind]
        replay()
        return Download(out)

    def _load(self, plan: StepPlan, draws: bool) -> None:
        """Choose the kind of step for these rows, and put them where it reads them."""
        size = self._sizes[bisect_left(self._sizes, len(plan.rows))]
        lengths = [self._rows.host_num_computed[row] for row in plan.rows]
        uneven = size >= _MIN_EVEN_ROWS and max(lengths) * len(lengths) > _UNEVEN * sum(lengths)
        kind = _Kind(size, uneven, draws)
        if kind not in self._graphs:
            self._graphs[kind] = self._record(kind)
        padding = [self._rows.scratch_row] * (size - len(plan.rows))
        self._row_buffer[:size] = upload([*plan.rows, *padding], self._row_buffer.device, torch.int64)
        self._loaded, self._loaded_kind = list(plan.rows), kind

    def _record(self, kind: _Kind) -> tuple[Callable[[], None], Tensor]:
        # Recorded on rows that belong to nobody, so that the warm-up changes no request.
        self._row_buffer[: kind.size] = self._rows.scratch_row
        return self._recorder.record(lambda: self._step(kind))

    def _step(self, kind: _Kind) -> Tensor:
        state, tables, size = self._rows, self._tables, kind.size
        rows = self._row_buffer[:size]
        input_ids, positions, contexts, slots = gather_inputs(
            rows, state.token_ids, state.num_computed, tables.tables, tables.block_size
        )
        starts = torch.arange(size + 1, dtype=torch.int32, device=rows.device)
        attention = [
            self._backend.prepare_decode(
                AttentionBatch(
                    query_lens=[],
                    context_lens=[],
                    tables=tables.tables[group],
                    rows=rows,
                    contexts=contexts,
                    query_starts=starts,
                    slot_mapping=slots[group],
                    block_size=tables.block_size,
                ),
                self._max_model_len,
                state.scratch_row,
                evenly=kind.uneven,
            )
            for group in range(tables.num_groups)
        ]
        hidden = self._model(input_ids, positions, ForwardBatch(attention=list(attention)))
        logits = self._model.compute_logits(hidden)
        place = (rows, state.token_ids, state.num_tokens, state.num_computed, state.scratch_row)
        if not kind.draws:
            return append_likeliest(logits, *place)
        assert self._sampler.draw_table is not None
        parameters = self._sampler.draw_table.parameters.index_select(1, rows)
        seeds = state.seeds.index_select(0, rows)
        tokens, highest = draw_within(logits, parameters, seeds, output_lengths(rows, state))
        return append_chosen(tokens, highest, *place)
