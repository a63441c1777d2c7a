"""allowed_token_ids: every other token becomes impossible, by a mask of the row's own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.runner.sampling.base import Feature, RowState, sampling_params
from quire.runner.sampling.mask_buffer import ALLOWED, MaskBuffer, mask_words
from quire.types.step import RowStart


class AllowedTokens(Feature):
    name = "allowed_tokens"

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, buffer: MaskBuffer) -> None:
        self._vocab_size, self._buffer = vocab_size, buffer
        self._staged: dict[int, NDArray[np.int32]] = {}
        self._rows: set[int] = set()

    def add_request(self, row: int, start: RowStart) -> bool:
        allowed = sampling_params(start).allowed_token_ids
        if allowed is None:
            return False
        self._rows.add(row)
        self._staged[row] = _mask_of(allowed, self._vocab_size)
        return True

    def remove_request(self, row: int) -> None:
        self._rows.discard(row)
        self._staged.pop(row, None)

    def apply_staged_writes(self) -> None:
        if self._staged:
            self._buffer.write(ALLOWED, list(self._staged), np.stack(list(self._staged.values())))
            self._staged.clear()
        self._buffer.line_up(ALLOWED, {row: row for row in self._rows})

    def apply(self, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None) -> None:
        """Nothing: the sampler applies all masks at once, before the first feature."""


def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
    mask = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    tokens = np.array([token for token in token_ids if 0 <= token < vocab_size], dtype=np.int64)
    np.bitwise_or.at(mask, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    return mask.view(np.int32)
