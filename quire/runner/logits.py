"""Logits for the rows that need them, padded to the sizes that the self-check proved invariant."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import nullcontext

import torch
from torch import Tensor

from quire.layers.adapters import AdapterTokens
from quire.models.base import Model


class LogitsHead:
    def __init__(self, model: Model, ladder: list[int], adapters: AdapterTokens | None = None) -> None:
        self._model, self._ladder, self._adapters = model, ladder, adapters

    @property
    def max_rows(self) -> int:
        return self._ladder[-1] if self._ladder else 256

    def __call__(self, hidden: Tensor, rows: Tensor | None = None, whole: bool = True) -> Tensor:
        """Logits of hidden [m, hidden]: [m, vocab] in the model's type. At most `max_rows` of them.

        Without `whole` they are of this rank's slice of the vocabulary. rows [m] int64: whose adapters count; None:
        nobody's.
        """
        count = hidden.shape[0]
        if self._ladder:
            padding = self._ladder[bisect_left(self._ladder, count)] - count
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, padding))
        adapters = None if rows is None else self._adapters
        with nullcontext() if adapters is None or rows is None else adapters.of_samples(rows, len(hidden)):
            return self._model.compute_logits(hidden, whole)[:count]
