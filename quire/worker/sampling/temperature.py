"""Temperature: divides the logits of rows that draw at random. Greedy rows are left alone."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.step import RowStart
from quire.worker.sampling.base import ActiveRows, Feature, RowState, RowValues, SampleRows, sampling_params


class Temperature(Feature):
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._values = RowValues(max_rows, 1, torch.float32, device)
        self._active = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        params = sampling_params(start)
        if not params.greedy and params.temperature != 1.0:
            self._values.set(row, params.temperature)
            self._active.add(row)

    def remove_request(self, row: int) -> None:
        self._active.discard(row)

    def apply_staged_writes(self) -> None:
        self._values.flush()

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        selection = self._active.select(rows)
        if selection is None:
            return logits
        temperature = self._values.get(selection.batch.rows)[0].unsqueeze(1)
        return selection.put(logits, selection.take(logits).div_(temperature))
