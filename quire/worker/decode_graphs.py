"""Decode steps as graphs: recorded once per batch size, then replayed without the host.

A step is two graphs, forward and sample, that replay back to back unless masks are waited for between them. They
read rows, positions, tables and masks where they stand on the device: the first feeds each row's last token to the
model, the second appends the next token and advances the row. So a replay needs nothing from the host but, when the
batch has changed, its list of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.triton import TritonAttention
from quire.kernels.triton.step import gather_inputs
from quire.layers.attention import ForwardBatch
from quire.models.base import CausalLM
from quire.platform.transfer import Download, upload
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.graphs import Recorders
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.recorded import sample_step
from quire.worker.sampling.sampler import RecordedKind, Sampler

# Contexts are alike where the longest is at most this many times the mean. It is asked from so many rows on:
# attention of fewer is the same either way, and each kind of step is recorded when it first comes up.
_ALIKE = 1.15
_MIN_ROWS = 32


class _Kind(NamedTuple):
    """What a forward pass is recorded for."""

    size: int
    alike: bool  # contexts hardly differ


_Recording = tuple[Callable[[], None], Tensor]


class DecodeGraphs:
    def __init__(
        self,
        model: CausalLM,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        sampler: Sampler,
        recorders: Recorders,
        sizes: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        assert isinstance(backend, TritonAttention)
        self._sampler = sampler
        self._model, self._rows, self._tables, self._backend = model, rows, tables, backend
        self._sizes = sizes
        self._max_model_len = max_model_len
        device = tables.tables.device
        self._row_buffer = torch.full((sizes[-1],), rows.scratch_row, dtype=torch.int64, device=device)
        self._starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        # Logits are not kept, so that those of all sizes share memory: what samples from them has memory of its own.
        self._forwards: dict[_Kind, _Recording] = {}
        self._samples: dict[tuple[_Kind, RecordedKind], _Recording] = {}
        self._recorders = recorders
        # Kinds of steps that nearly every engine comes to.
        self._usual = iter(
            [
                (_Kind(size, alike), sampling)
                for size in sizes
                for alike in (False, True)[: 2 if size >= _MIN_ROWS else 1]
                for sampling in sampler.usual_kinds
            ]
        )
        self._loaded: list[int] = []  # what the buffer holds, and how it is sampled
        self._loaded_kind: RecordedKind | None = None
        self._forward: _Recording | None = None
        self._sample: _Recording | None = None

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Record the smallest usual kind of step that is missing; False if none is."""
        for kind, sampling in self._usual:
            if (kind, sampling) not in self._samples:
                self._record(kind, sampling)
                self._loaded = []  # recording used the buffer
                return True
        return False

    def takes(self, plan: StepPlan) -> bool:
        """Whether a recorded size can hold this step and every row computes its one last known token.

        A single token may also be the end or the whole of a chunk, after which more of the prompt follows.
        """
        if len(plan.rows) > self._sizes[-1] or sum(plan.num_tokens) != len(plan.rows):
            return False
        computed, known = self._rows.host_num_computed, self._rows.host_num_tokens
        return all(computed[row] + 1 == known[row] for row in plan.rows)

    def run(self, plan: StepPlan) -> Download:
        """Replay both pieces back to back."""
        self.forward(plan)
        return self.sample()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Replay the model's part."""
        kind = self._sampler.recorded_kind(plan.rows, bool(plan.mask_slots))
        assert kind is not None, "such rows are sampled from the host"
        if plan.rows != self._loaded or kind != self._loaded_kind:
            self._load(plan, kind)
        assert self._forward is not None
        self._forward[0]()

    @torch.inference_mode()
    def sample(self) -> Download:
        """Replay the rest. The result, once it has arrived, is [2, size] int32: tokens, and what was wrong or 0."""
        assert self._sample is not None
        replay, out = self._sample
        replay()
        return Download(out)

    def _load(self, plan: StepPlan, sampling: RecordedKind) -> None:
        """Choose the kind of step for these rows, and put them where it reads them."""
        size = self._sizes[bisect_left(self._sizes, len(plan.rows))]
        lengths = [self._rows.host_num_computed[row] for row in plan.rows]
        alike = size >= _MIN_ROWS and max(lengths) * len(lengths) <= _ALIKE * sum(lengths)
        kind = _Kind(size, alike)
        self._record(kind, sampling)
        padding = [self._rows.scratch_row] * (size - len(plan.rows))
        self._row_buffer[:size] = upload([*plan.rows, *padding], self._row_buffer.device, torch.int64)
        self._loaded, self._loaded_kind = list(plan.rows), sampling
        self._forward, self._sample = self._forwards[kind], self._samples[kind, sampling]

    def _record(self, kind: _Kind, sampling: RecordedKind) -> None:
        """Record what is missing, on rows that belong to nobody, so that the warm-up changes no request."""
        if (kind, sampling) in self._samples:
            return
        rows = self._row_buffer[: kind.size]
        rows.fill_(self._rows.scratch_row)
        if kind not in self._forwards:
            self._forwards[kind] = self._recorders.forward.record(lambda: self._logits(kind), keep=False)
        logits = self._forwards[kind][1]
        self._samples[kind, sampling] = self._recorders.sample.record(
            lambda: sample_step(sampling, self._sampler, logits, rows, self._rows)
        )

    def _logits(self, kind: _Kind) -> Tensor:
        state, tables, size = self._rows, self._tables, kind.size
        rows = self._row_buffer[:size]
        input_ids, positions, contexts, slots = gather_inputs(
            rows, state.token_ids, state.num_computed, tables.tables, tables.block_size
        )
        attention = [
            self._backend.prepare_decode(
                AttentionBatch(
                    query_lens=[],
                    context_lens=[],
                    tables=tables.tables[group],
                    rows=rows,
                    contexts=contexts,
                    query_starts=self._starts[: size + 1],
                    slot_mapping=slots[group],
                    block_size=tables.block_size,
                ),
                self._max_model_len,
                state.scratch_row,
                alike=kind.alike,
            )
            for group in range(tables.num_groups)
        ]
        hidden = self._model(input_ids, positions, ForwardBatch(attention=list(attention)))
        return self._model.compute_logits(hidden)
