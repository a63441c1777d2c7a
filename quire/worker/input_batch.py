"""InputBatch: what one forward pass reads, gathered from the rows by a plan."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.layers.attention import ForwardBatch
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class InputBatch:
    rows: Tensor  # [num_rows] int64
    counts: Tensor  # [num_rows] int64, tokens of each row
    input_ids: Tensor  # [num_tokens_padded] int64
    positions: Tensor  # [num_tokens_padded] int64
    forward: ForwardBatch
    starts: list[int]  # [num_rows] index of each row's first token
    sample_indices: list[int]  # index into the plan's rows of those that sample in this step


class InputBuilder:
    """Turns a plan into an InputBatch. Tokens are padded up to the next size of the ladder."""

    def __init__(
        self,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        ladder: list[int],
        device: torch.device,
    ) -> None:
        self._rows, self._tables, self._backend, self._ladder = rows, tables, backend, ladder
        self._device = device

    def padded_size(self, num_tokens: int) -> int:
        return self._ladder[bisect_left(self._ladder, num_tokens)]

    def build(self, plan: StepPlan) -> InputBatch:
        state, device = self._rows, self._device
        computed = state.host_num_computed
        contexts = [computed[row] + count for row, count in zip(plan.rows, plan.num_tokens, strict=True)]
        known = state.host_num_tokens
        sample_indices = [
            index for index, (row, end) in enumerate(zip(plan.rows, contexts, strict=True)) if end == known[row]
        ]
        starts, total = [], 0
        for count in plan.num_tokens:
            starts.append(total)
            total += count
        rows = torch.tensor(plan.rows, device=device)
        counts = torch.tensor(plan.num_tokens, device=device)
        if total == len(plan.rows):
            token_rows, positions = rows, state.num_computed[rows]
        else:
            token_rows = rows.repeat_interleave(counts, output_size=total)
            first = state.num_computed[rows] - torch.tensor(starts, device=device)
            positions = torch.arange(total, device=device) + first.repeat_interleave(counts, output_size=total)
        padding = self.padded_size(total) - total
        pad = torch.nn.functional.pad
        max_context = max(contexts)
        attention = [
            self._backend.prepare(
                AttentionBatch(
                    query_lens=plan.num_tokens,
                    context_lens=contexts,
                    block_tables=self._tables.of_rows(group, rows, max_context),
                    slot_mapping=pad(self._tables.slots(group, token_rows, positions), (0, padding)),
                    block_size=self._tables.block_size,
                )
            )
            for group in range(self._tables.num_groups)
        ]
        return InputBatch(
            rows=rows,
            counts=counts,
            input_ids=pad(state.token_ids[token_rows, positions].long(), (0, padding)),
            positions=pad(positions, (0, padding)),
            forward=ForwardBatch(attention=attention),
            starts=starts,
            sample_indices=sample_indices,
        )
