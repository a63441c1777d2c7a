"""logit_bias: adds a number to the logits of chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.step import RowStart
from quire.worker.sampling.base import (
    ActiveRows,
    Feature,
    RowLists,
    RowState,
    SampleRows,
    add_to_entries,
    sampling_params,
)


class LogitBias(Feature):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._biases = RowLists(2, torch.float64, device)  # (token id, bias); float64 holds an id exactly
        self._active = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        biases = sampling_params(start).logit_bias or {}
        # A token outside the vocabulary cannot be chosen, so its bias has no effect.
        records = [(token, bias) for token, bias in biases.items() if 0 <= token < self._vocab_size]
        if records:
            self._biases.set(row, records)
            self._active.add(row)

    def remove_request(self, row: int) -> None:
        self._biases.clear(row)
        self._active.discard(row)

    def apply_staged_writes(self) -> None:
        self._biases.flush()

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        if self._active.select(rows) is None:
            return logits
        row, token_ids, bias = self._biases.table.unbind(1)
        places = rows.index_of(row.to(torch.int64))
        return add_to_entries(logits, places, token_ids.to(torch.int64), bias.to(torch.float32))
