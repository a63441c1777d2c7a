"""min_tokens: end-of-sequence and stop tokens are impossible until enough tokens are out.

The model's end-of-sequence tokens are held back under ignore_eos too, as in vLLM.
"""

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
    output_lengths,
    sampling_params,
)


class MinTokens(Feature):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._stops = RowLists(2, torch.int64, device)  # (stop token, min_tokens)
        self._active = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        params = sampling_params(start)
        outputs = len(start.token_ids) - start.num_prompt_tokens
        if params.min_tokens <= outputs:
            return
        # A stop token outside the vocabulary cannot be chosen anyway.
        stops = {token for token in (*start.eos_token_ids, *params.stop_token_ids) if 0 <= token < self._vocab_size}
        if stops:
            self._stops.set(row, [(token, params.min_tokens) for token in sorted(stops)])
            self._active.add(row)

    def remove_request(self, row: int) -> None:
        self._stops.clear(row)
        self._active.discard(row)

    def apply_staged_writes(self) -> None:
        self._stops.flush()

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        if self._active.select(rows) is None:
            return logits
        row, token_ids, min_tokens = self._stops.table.unbind(1)
        ban = torch.where(output_lengths(row, state) < min_tokens, -torch.inf, 0.0)
        return add_to_entries(logits, rows.index_of(row), token_ids, ban)
