"""top_k, then top_p on what top_k left. Both keep a prefix of the order in ops/order.py: higher logit, then lower id.

top_k keeps the first k tokens. top_p keeps the shortest prefix whose probability, renormalized after top_k,
reaches p; at least one token. Probabilities are added as integers (multiples of 2^-40), so that sums are exact
and no batch can move the cut. They come from a softmax over the vocabulary, which works on each row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.order import keep_prefix, likeliest
from quire.ops.top_p import KEEP_TOP_P, needed_weight, weights_of
from quire.types.step import RowStart
from quire.worker.sampling.base import ActiveRows, Feature, RowState, RowValues, SampleRows, sampling_params

# Up to this top_k, the k candidates are gathered and noise is drawn for them alone.
MAX_CANDIDATES = 1024


class TopKTopP(Feature):
    """Rows with a small top_k go through `candidates`, all others through `apply`; the cut is the same."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._top_k = RowValues(max_rows, 1, torch.int64, device)
        self._top_p = RowValues(max_rows, 1, torch.float64, device)
        self._counts: dict[int, int] = {}  # row -> top_k, of those rows that have one
        self._with_k = ActiveRows()
        self._with_p = ActiveRows()
        self._keep_top_p = KEEP_TOP_P.bind(Target(device.type))

    def add_request(self, row: int, start: RowStart) -> None:
        params = sampling_params(start)
        if params.greedy:
            return
        if 0 < params.top_k < self._vocab_size:
            self._counts[row] = params.top_k
            self._top_k.set(row, params.top_k)
            self._with_k.add(row)
        if params.top_p < 1.0:
            self._top_p.set(row, params.top_p)
            self._with_p.add(row)

    def remove_request(self, row: int) -> None:
        self._counts.pop(row, None)
        self._with_k.discard(row)
        self._with_p.discard(row)

    def apply_staged_writes(self) -> None:
        self._top_k.flush()
        self._top_p.flush()

    def has_few_candidates(self, row: int) -> bool:
        return 0 < self._counts.get(row, 0) <= MAX_CANDIDATES

    def candidates(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        """Logits [m, k] and token ids [m, k] of what may be drawn, for rows that all have few candidates.

        k is the largest top_k of the batch; what a row may not draw has the logit -inf.
        """
        values, token_ids = likeliest(logits, max(self._counts[row] for row in rows.row_list))
        places = torch.arange(values.shape[1], device=logits.device)
        values.masked_fill_(places >= self._top_k.get(rows.rows)[0].unsqueeze(1), -torch.inf)
        selection = self._with_p.select(rows)
        if selection is None:
            return values, token_ids
        part = selection.take(values)
        weights = weights_of(selection.take(logits).softmax(-1).gather(1, selection.take(token_ids)), part)
        before = weights.cumsum(1) - weights
        dropped = before >= needed_weight(weights, self._top_p.get(selection.batch.rows)[0]).unsqueeze(1)
        return selection.put(values, part.masked_fill_(dropped, -torch.inf)), token_ids

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        with_k, with_p = self._with_k.select(rows), self._with_p.select(rows)
        probabilities = None if with_p is None else with_p.take(logits).softmax(-1)
        if with_k is not None:
            part = with_k.take(logits)
            ones = torch.ones_like(part, dtype=torch.int64)
            kept = keep_prefix(part, ones, self._top_k.get(with_k.batch.rows)[0])
            logits = with_k.put(logits, part.masked_fill_(~kept, -torch.inf))
        if with_p is not None and probabilities is not None:
            top_p = self._top_p.get(with_p.batch.rows)[0]
            logits = with_p.put(logits, self._keep_top_p(with_p.take(logits), probabilities, top_p))
        return logits
