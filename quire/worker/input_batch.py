"""What a plan means for its rows, and InputBatch: what one forward pass reads, gathered from them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.platform.transfer import upload
from quire.types.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class PlannedTokens:
    """Where the tokens of a step stand, as the host knows it."""

    total: int
    starts: list[int]  # [num_rows] index of each row's first token
    contexts: list[int]  # [num_rows] how many tokens of each row are computed after the step
    sample_indices: list[int]  # index into the plan's rows of those that sample in this step
    sample_rows: list[int]  # [m] the rows themselves
    last_tokens: list[int]  # [m] index of each one's last token


def planned_tokens(plan: StepPlan, state: RequestRows) -> PlannedTokens:
    """A row samples when its computed tokens catch up with those that are known."""
    computed, known = state.host_num_computed, state.host_num_tokens
    contexts = [computed[row] + count for row, count in zip(plan.rows, plan.num_tokens, strict=True)]
    starts, total = [], 0
    for count in plan.num_tokens:
        starts.append(total)
        total += count
    samples = [index for index, (row, end) in enumerate(zip(plan.rows, contexts, strict=True)) if end == known[row]]
    return PlannedTokens(
        total=total,
        starts=starts,
        contexts=contexts,
        sample_indices=samples,
        sample_rows=[plan.rows[index] for index in samples],
        last_tokens=[starts[index] + plan.num_tokens[index] - 1 for index in samples],
    )


@dataclass(frozen=True, slots=True)
class InputBatch:
    rows: Tensor  # [num_rows] int64
    counts: Tensor  # [num_rows] int64, tokens of each row
    input_ids: Tensor  # [num_tokens_padded] int64
    positions: Tensor  # [num_tokens_padded] int64
    groups: list[AttentionBatch]  # what each KV group sees
    forward: ForwardBatch  # the same, prepared by the backend
    wanted_group: AttentionBatch | None  # the wanted tokens, if not all are, as the first KV group sees them
    starts: list[int]  # [num_rows] index of each row's first token
    sample_indices: list[int]  # index into the plan's rows of those that sample in this step
    sample_rows: list[int]  # [m] the rows themselves
    sample_rows_tensor: Tensor  # [m] int64
    last_tokens: Tensor  # [m] int64, each one's last token in the step

    @property
    def hidden_indices(self) -> Tensor:
        """[m] int64: where the hidden states of the rows that sample are."""
        if self.forward.wanted is None:
            return self.last_tokens
        return torch.arange(len(self.sample_rows), device=self.last_tokens.device)


@dataclass(frozen=True)
class Narrowing:
    """When the last layer of a step computes only the tokens that are sampled from."""

    above: int  # tokens of a step
    ladder: list[int]  # sizes that the number of wanted tokens is padded to; empty: none


class InputBuilder:
    """Turns a plan into an InputBatch. Tokens are padded up to the next size of the ladder."""

    def __init__(
        self,
        rows: RequestRows,
        tables: BlockTables,
        backend: AttentionBackend,
        ladder: list[int],
        device: torch.device,
        narrowing: Narrowing | None = None,
    ) -> None:
        self._rows, self._tables, self._backend, self._ladder = rows, tables, backend, ladder
        self._device, self._narrowing = device, narrowing

    def padded_size(self, num_tokens: int) -> int:
        return self._ladder[bisect_left(self._ladder, num_tokens)] if self._ladder else num_tokens

    def build(self, plan: StepPlan, planned: PlannedTokens, every_token: bool = False) -> InputBatch:
        """With `every_token` the hidden states of all tokens are wanted, not only of those sampled from."""
        state, tables = self._rows, self._tables
        contexts, starts, total = planned.contexts, planned.starts, planned.total
        last, sample_rows = planned.last_tokens, planned.sample_rows
        n = len(plan.rows)
        packed = upload(
            [*plan.rows, *plan.num_tokens, *starts, total, *contexts, *last, *sample_rows], self._device, torch.int64
        )
        rows, counts, query_starts, context_tensor, last_tokens, sampled = packed.split(
            [n, n, n + 1, n, len(last), len(last)]
        )
        if total == n:
            token_rows, positions = rows, state.num_computed[rows]
        else:
            token_rows = rows.repeat_interleave(counts, output_size=total)
            first = state.num_computed[rows] - query_starts[:-1]
            positions = torch.arange(total, device=self._device) + first.repeat_interleave(counts, output_size=total)
        padding = self.padded_size(total) - total
        pad = torch.nn.functional.pad
        contexts_32, starts_32 = context_tensor.to(torch.int32), query_starts.to(torch.int32)
        groups = [
            AttentionBatch(
                query_lens=plan.num_tokens,
                context_lens=contexts,
                tables=tables.tables[group],
                rows=rows,
                contexts=contexts_32,
                query_starts=starts_32,
                slot_mapping=pad(tables.slots(group, token_rows, positions), (0, padding)),
                block_size=tables.block_size,
            )
            for group in range(tables.num_groups)
        ]
        wanted: WantedTokens | None = None
        wanted_groups: list[AttentionBatch] = []
        if self._narrowing is not None and total > self._narrowing.above and not every_token:
            ends = [start + count - 1 for start, count in zip(starts, plan.num_tokens, strict=True)]
            tokens, wanted_groups = self._wanted(planned.sample_indices, plan.rows, ends, contexts)
            finite = torch.empty(total + padding, dtype=torch.bool, device=self._device)
            wanted = WantedTokens(tokens, [self._backend.prepare(group) for group in wanted_groups], finite)
        return InputBatch(
            rows=rows,
            counts=counts,
            input_ids=pad(state.token_ids[token_rows, positions].long(), (0, padding)),
            positions=pad(positions, (0, padding)),
            groups=groups,
            forward=ForwardBatch([self._backend.prepare(group) for group in groups], wanted),
            wanted_group=wanted_groups[0] if wanted_groups else None,
            starts=starts,
            sample_indices=planned.sample_indices,
            sample_rows=sample_rows,
            sample_rows_tensor=sampled,
            last_tokens=last_tokens,
        )

    def _wanted(
        self, indices: list[int], rows: list[int], ends: list[int], contexts: list[int]
    ) -> tuple[Tensor, list[AttentionBatch]]:
        """The last tokens of these rows, padded with the last one (some token if there are none), each as a row."""
        assert self._narrowing is not None
        ladder = self._narrowing.ladder
        chosen = indices or [len(rows) - 1]
        if ladder:
            chosen = [*chosen, *chosen[-1:] * (ladder[bisect_left(ladder, len(chosen))] - len(chosen))]
        count = len(chosen)
        context_lens = [contexts[index] for index in chosen]
        columns = ([ends[index] for index in chosen], [rows[index] for index in chosen], context_lens)
        packed = upload([*(x for column in columns for x in column), *range(count + 1)], self._device, torch.int64)
        tokens, row_tensor, context_tensor, query_starts = packed.split([count, count, count, count + 1])
        contexts_32, starts_32 = context_tensor.to(torch.int32), query_starts.to(torch.int32)
        groups = [
            AttentionBatch(
                query_lens=[1] * count,
                context_lens=context_lens,
                tables=self._tables.tables[group],
                rows=row_tensor,
                contexts=contexts_32,
                query_starts=starts_32,
                slot_mapping=tokens[:0],  # nothing is written
                block_size=self._tables.block_size,
            )
            for group in range(self._tables.num_groups)
        ]
        return tokens, groups
