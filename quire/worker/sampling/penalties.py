"""Presence, frequency and repetition penalties, counted afresh each step from the row's tokens: no state to lose.

Presence and frequency count outputs only; repetition looks at the prompt and the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.step import RowStart
from quire.worker.sampling.base import ActiveRows, Feature, RowState, RowValues, SampleRows, sampling_params


class Penalties(Feature):
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._values = RowValues(max_rows, 3, torch.float32, device)  # presence, frequency, repetition
        self._counting = ActiveRows()  # presence or frequency
        self._repetition = ActiveRows()

    def add_request(self, row: int, start: RowStart) -> None:
        params = sampling_params(start)
        counting = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        repetition = params.repetition_penalty != 1.0
        if counting:
            self._counting.add(row)
        if repetition:
            self._repetition.add(row)
        if counting or repetition:
            self._values.set(row, params.presence_penalty, params.frequency_penalty, params.repetition_penalty)

    def remove_request(self, row: int) -> None:
        self._counting.discard(row)
        self._repetition.discard(row)

    def apply_staged_writes(self) -> None:
        self._values.flush()

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        selection = self._repetition.select(rows)
        if selection is not None:
            part = selection.take(logits)
            seen = _token_counts(selection.batch, state, part.shape[1], outputs_only=False) > 0
            penalty = self._values.get(selection.batch.rows)[2].unsqueeze(1)
            penalized = torch.where(part > 0, part / penalty, part * penalty)
            logits = selection.put(logits, torch.where(seen, penalized, part))
        selection = self._counting.select(rows)
        if selection is not None:
            part = selection.take(logits)
            counts = _token_counts(selection.batch, state, part.shape[1], outputs_only=True)
            presence, frequency, _ = self._values.get(selection.batch.rows).unsqueeze(2)
            part = part.sub_(counts * frequency).sub_((counts > 0) * presence)
            logits = selection.put(logits, part)
        return logits


def _token_counts(rows: SampleRows, state: RowState, vocab_size: int, outputs_only: bool) -> Tensor:
    """[m, vocab_size] float32: how often each token occurs in the row."""
    tokens = state.token_ids[:, : rows.max_num_tokens].index_select(0, rows.rows).to(torch.int64)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    counted = places < state.num_tokens.index_select(0, rows.rows).unsqueeze(1)
    if outputs_only:
        counted &= places >= state.num_prompt_tokens.index_select(0, rows.rows).unsqueeze(1)
    # Placeholders of media may lie outside the vocabulary, and places past the end hold anything.
    counted &= (tokens >= 0) & (tokens < vocab_size)
    counts = torch.zeros(len(rows.row_list), vocab_size, dtype=torch.float32, device=tokens.device)
    return counts.scatter_add_(1, tokens.masked_fill_(~counted, 0), counted.to(torch.float32))
