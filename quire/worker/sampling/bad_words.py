"""bad_words: the last token of a forbidden sequence is impossible when the outputs end with the rest of it.

Like vLLM, only generated tokens are matched: a word that the prompt begins may be finished.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.platform.transfer import refresh
from quire.types.step import RowStart
from quire.worker.sampling.base import (
    ActiveRows,
    Feature,
    RowState,
    SampleRows,
    add_to_entries,
    output_lengths,
    sampling_params,
)

_ANY = -1  # matches every token: fills short sequences up to the longest


class BadWords(Feature):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._active = ActiveRows()
        self._changed = False
        # A line per sequence: row, last token, how many tokens come before it, and those, last one first.
        self._table = torch.zeros(0, 3, dtype=torch.int64, device=device)

    def add_request(self, row: int, start: RowStart) -> None:
        words = sampling_params(start).bad_words_token_ids
        # A sequence with a token outside the vocabulary cannot be generated.
        words = tuple(word for word in words if word and all(0 <= token < self._vocab_size for token in word))
        if words:
            self._words[row] = words
            self._active.add(row)
            self._changed = True

    def remove_request(self, row: int) -> None:
        self._active.discard(row)
        if self._words.pop(row, None) is not None:
            self._changed = True

    def apply_staged_writes(self) -> None:
        if not self._changed:
            return
        longest = max((len(word) for words in self._words.values() for word in words), default=1)
        lines = [
            [row, word[-1], len(word) - 1, *reversed(word[:-1]), *[_ANY] * (longest - len(word))]
            for row, words in self._words.items()
            for word in words
        ]
        table = torch.tensor(lines, dtype=torch.int64).view(-1, 2 + longest)
        self._table = torch.empty(table.shape, dtype=torch.int64, device=self._table.device)
        refresh(self._table, table)
        self._changed = False

    def apply(self, logits: Tensor, rows: SampleRows, state: RowState) -> Tensor:
        if self._active.select(rows) is None:
            return logits
        row, last, length = self._table[:, :3].unbind(1)
        before = self._table[:, 3:]
        back = torch.arange(1, before.shape[1] + 1, device=logits.device)
        places = (state.num_tokens[row].unsqueeze(1) - back).clamp_(min=0)
        matches = ((state.token_ids[row.unsqueeze(1), places] == before) | (before == _ANY)).all(1)
        matches &= length <= output_lengths(row, state)
        ban = torch.where(matches, -torch.inf, 0.0)
        return add_to_entries(logits, rows.index_of(row), last, ban)
