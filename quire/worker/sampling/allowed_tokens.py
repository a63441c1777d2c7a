"""allowed_token_ids: every other token becomes impossible."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.step import RowStart
from quire.worker.sampling.base import ActiveRows, Feature, RowLists, RowState, SampleRows, sampling_params


class AllowedTokens(Feature):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._allowed = RowLists(1, torch.int64, device)
        self._active = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        allowed = sampling_params(start).allowed_token_ids
        if allowed is not None:
            self._allowed.set(row, [(token,) for token in allowed if 0 <= token < self._vocab_size])
            self._active.add(row)

    def remove_request(self, row: int) -> None:
        self._allowed.clear(row)
        self._active.discard(row)

    def apply_staged_writes(self) -> None:
        self._allowed.flush()

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        selection = self._active.select(rows)
        if selection is None:
            return logits
        part = selection.take(logits)
        row, token_ids = self._allowed.table.unbind(1)
        # Place -1 writes into the spare last line.
        allowed = torch.zeros(len(part) + 1, part.shape[1], dtype=torch.bool, device=part.device)
        yes = torch.ones((), dtype=torch.bool, device=part.device)  # a number of the host's would be waited for
        allowed.index_put_((selection.batch.index_of(row), token_ids), yes)
        return selection.put(logits, part.masked_fill_(~allowed[:-1], -torch.inf))
