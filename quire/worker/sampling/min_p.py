"""min_p: drops tokens whose probability is below a fraction of the likeliest one's.

p < min_p * p_max is decided on logits, x < x_max + log(min_p), so it needs no softmax. The likeliest token and
its equals always stay.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.types.step import RowStart
from quire.worker.sampling.base import ActiveRows, Feature, RowState, RowValues, SampleRows, sampling_params


class MinP(Feature):
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._log_min_p = RowValues(max_rows, 1, torch.float32, device)
        self._active = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        params = sampling_params(start)
        if not params.greedy and params.min_p > 0.0:
            self._log_min_p.set(row, math.log(params.min_p))
            self._active.add(row)

    def remove_request(self, row: int) -> None:
        self._active.discard(row)

    def apply_staged_writes(self) -> None:
        self._log_min_p.flush()

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        selection = self._active.select(rows)
        if selection is None:
            return logits
        part = selection.take(logits)
        lowest = part.amax(-1, keepdim=True) + self._log_min_p.get(selection.batch.rows)[0].unsqueeze(1)
        return selection.put(logits, part.masked_fill_(part < lowest, -torch.inf))
