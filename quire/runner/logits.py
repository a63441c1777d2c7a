"""Logits for the rows that need them, padded to the sizes that the self-check proved invariant."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from quire.models.base import Model


class LogitsHead:
    def __init__(self, model: Model, ladder: list[int]) -> None:
        self._model = model
        self._ladder = ladder

    @property
    def max_rows(self) -> int:
        return self._ladder[-1] if self._ladder else 256

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of hidden [m, hidden]: [m, vocab] in the model's type. At most `max_rows` of them."""
        count = hidden.shape[0]
        if self._ladder:
            padding = self._ladder[bisect_left(self._ladder, count)] - count
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, padding))
        return self._model.compute_logits(hidden)[:count]
