"""Edits: numbers that are added to the logits of single tokens, always or under a condition; -inf bans a token.

logit_bias, min_tokens and bad_words are edits. Those of a request stand in a table of fixed size, which captured
steps read; a request with more of them, or longer words, has its edits in a second table, for eager steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.base import Target
from quire.ops.shaping import ANY, EDIT_LOGITS, FIXED_COLUMNS
from quire.platform.transfer import refresh, upload_array
from quire.runner.sampling.base import Feature, RowState, RowValues, sampling_params
from quire.types.step import RowStart

MAX_EDITS = 512  # of a request, in the first table
MAX_BEFORE = 7  # tokens of a bad word that come before its last, in the first table
_ALWAYS = 2**31 - 1

Edit = tuple[int, ...]
"""A token, the bits of what is added to its logit, how many outputs are too many, how many are needed, and which
tokens come before, the last first."""


def _bits(value: float) -> int:
    with np.errstate(over="ignore"):  # a value that is infinite in float32 fails its own row
        return int(np.float32(value).view(np.int32))


_BAN = _bits(-np.inf)


def logit_bias(start: RowStart) -> list[Edit]:
    return [(token, _bits(bias), _ALWAYS, 0) for token, bias in (sampling_params(start).logit_bias or {}).items()]


def min_tokens(start: RowStart) -> list[Edit]:
    """Tokens that end or stop are impossible until enough tokens are out; as in vLLM, under ignore_eos too."""
    params = sampling_params(start)
    if params.min_tokens <= len(start.token_ids) - start.num_prompt_tokens:
        return []
    stops = sorted({*start.eos_token_ids, *params.stop_token_ids})
    return [(token, _BAN, params.min_tokens, 0) for token in stops]


def bad_words(start: RowStart) -> list[Edit]:
    """The last token of a forbidden sequence is impossible when the outputs end with the rest of it.

    Like vLLM, only generated tokens are matched: a word that the prompt begins may be finished.
    """
    words = [word for word in sampling_params(start).bad_words_token_ids if word]
    return [(word[-1], _BAN, _ALWAYS, len(word) - 1, *reversed(word[:-1])) for word in words]


SOURCES: tuple[Callable[[RowStart], list[Edit]], ...] = (logit_bias, min_tokens, bad_words)


class _Table:
    """Lines of edits [n, columns], and where those of each row begin and how many they are."""

    def __init__(self, edits: Tensor, max_rows: int, device: torch.device) -> None:
        self.edits = edits
        self.ranges = RowValues(max_rows + 1, 2, torch.int32, device)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        starts, counts = self.ranges.all
        return self.edits, starts, counts


class Edits(Feature):
    name = "edits"

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        shape = (max_rows * MAX_EDITS, FIXED_COLUMNS + MAX_BEFORE)
        self._fixed = _Table(torch.zeros(shape, dtype=torch.int32, device=device), max_rows, device)
        self._large = _Table(torch.zeros(0, FIXED_COLUMNS, dtype=torch.int32, device=device), max_rows, device)
        self._staged: dict[int, NDArray[np.int32]] = {}
        self._oversized: dict[int, list[Edit]] = {}
        self._large_changed = False
        self._edit_logits = EDIT_LOGITS.bind(Target(device.type))

    def add_request(self, row: int, start: RowStart) -> bool:
        edits = [edit for source in SOURCES for edit in source(start)]
        # A token outside the vocabulary cannot be chosen, nor can it come before another.
        edits = [
            edit for edit in edits if all(0 <= token < self._vocab_size for token in (edit[0], *edit[FIXED_COLUMNS:]))
        ]
        if len(edits) > MAX_EDITS or any(len(edit) > FIXED_COLUMNS + MAX_BEFORE for edit in edits):
            self._oversized[row] = edits
            self._large_changed = True
            self._fixed.ranges.set(row, row * MAX_EDITS, 0)
            return True
        self._fixed.ranges.set(row, row * MAX_EDITS, len(edits))
        if edits:
            self._staged[row] = _lines(edits, self._fixed.edits.shape[1])
        return bool(edits)

    def remove_request(self, row: int) -> None:
        self._staged.pop(row, None)
        if self._oversized.pop(row, None) is not None:
            self._large_changed = True

    def is_oversized(self, row: int) -> bool:
        return row in self._oversized

    def apply_staged_writes(self) -> None:
        self._fixed.ranges.flush()
        for row, lines in self._staged.items():
            first = row * MAX_EDITS
            self._fixed.edits[first : first + len(lines)] = upload_array(lines, self._device)
        self._staged.clear()
        if self._large_changed:
            self._write_large()
            self._large_changed = False

    def _write_large(self) -> None:
        table, first = self._large, 0
        for row in range(table.ranges.all.shape[1]):
            table.ranges.set(row, first, len(self._oversized.get(row, ())))
            first += len(self._oversized.get(row, ()))
        table.ranges.flush()
        edits = [edit for _, edits in sorted(self._oversized.items()) for edit in edits]
        lines = torch.from_numpy(_lines(edits, max(map(len, edits), default=FIXED_COLUMNS)))
        table.edits = torch.empty(lines.shape, dtype=torch.int32, device=self._device)
        refresh(table.edits, lines)

    def apply(self, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None) -> None:
        known = (state.token_ids, state.num_tokens, state.num_prompt_tokens)
        self._edit_logits(logits, rows, *self._fixed.columns, *known, ahead)
        if self._oversized:
            self._edit_logits(logits, rows, *self._large.columns, *known, ahead)


def _lines(edits: list[Edit], columns: int) -> NDArray[np.int32]:
    lines = np.full((len(edits), columns), ANY, dtype=np.int32)
    for line, edit in zip(lines, edits, strict=True):
        line[: len(edit)] = edit
    return lines
