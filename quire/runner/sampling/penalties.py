"""Presence, frequency and repetition penalties, counted afresh each step from the row's tokens: no state to lose.

Presence and frequency count outputs only; repetition looks at the prompt and the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.shaping import PENALIZE
from quire.runner.sampling.base import Feature, RowState, RowValues, sampling_params
from quire.types.step import RowStart

_NONE = (0.0, 0.0, 1.0)


class Penalties(Feature):
    name = "penalties"

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        # One more row, for the padding of a batch.
        self._values = RowValues(max_rows + 1, 3, torch.float32, device)
        self._values.set(max_rows, *_NONE)
        self._penalize = PENALIZE.bind(Target(device.type))

    def add_request(self, row: int, start: RowStart) -> bool:
        params = sampling_params(start)
        values = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._values.set(row, *values)
        return values != _NONE  # what the table says of a row that is free, no step reads

    def apply_staged_writes(self) -> None:
        self._values.flush()

    def apply(self, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None) -> None:
        known = (state.token_ids, state.num_tokens, state.num_prompt_tokens, ahead)
        self._penalize(logits, rows, self._values.all, *known)
