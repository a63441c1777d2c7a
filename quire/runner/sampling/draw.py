"""temperature, min_p, top_k and top_p of every row, as the op draw_within reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.runner.sampling.base import RowValues
from quire.types.sampling import SamplingParams


class DrawTable:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # One more row, for the padding of a batch: its zeros are greedy.
        self._values = RowValues(max_rows + 1, 4, torch.float64, device)

    @property
    def parameters(self) -> Tensor:
        """[4, max_rows + 1] float64, always the same tensor."""
        return self._values.all

    def set(self, row: int, params: SamplingParams) -> None:
        """Stage a row's parameters. Host only."""
        if params.greedy:
            self._values.set(row, 0.0, -math.inf, 0, 1.0)
            return
        log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._values.set(row, params.temperature, log_min_p, top_k, params.top_p)

    def apply_staged_writes(self) -> None:
        self._values.flush()
