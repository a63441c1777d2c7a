"""What changes the logits of every row, where recorded steps can read it: bans, biases, penalties, allowed tokens.

The same parameters that the features in this folder take, in tables of fixed sizes. A request that does not fit into
them is sampled from the host.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.triton.shaping import FIXED_COLUMNS
from quire.platform.transfer import upload, upload_array
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart
from quire.worker.sampling.base import RowValues, sampling_params
from quire.worker.sampling.mask_buffer import MaskBuffer, mask_words

MAX_EDITS = 512  # of a request
MAX_BEFORE = 7  # tokens of a bad word that come before its last
_KIND = 1  # of the mask buffer's lines
_ALWAYS = 2**31 - 1
_ANY = -1


class ShapingTable:
    def __init__(self, vocab_size: int, max_rows: int, masks: MaskBuffer, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._masks = masks
        self.edits = torch.zeros(
            max_rows + 1, MAX_EDITS, FIXED_COLUMNS + MAX_BEFORE, dtype=torch.int32, device=device
        )
        self._counts = RowValues(max_rows + 1, 1, torch.int32, device)
        self._penalties = RowValues(max_rows + 1, 3, torch.float32, device)
        self._penalties.set(max_rows, 0.0, 0.0, 1.0)
        self._staged_edits: dict[int, NDArray[np.int32]] = {}
        self._staged_masks: dict[int, NDArray[np.int32]] = {}
        self.shaped: set[int] = set()  # rows that ask for any of it
        self.too_large: set[int] = set()  # rows that ask for more than fits
        self._allowing: set[int] = set()
        self._lined_up: set[int] = set()  # what the buffer was last told of them

    @property
    def counts(self) -> Tensor:
        """[max_rows + 1] int32: how many edits a row has."""
        return self._counts.all[0]

    @property
    def penalties(self) -> Tensor:
        """[3, max_rows + 1] float32"""
        return self._penalties.all

    def set(self, row: int, start: RowStart) -> None:
        """Stage a row's parameters, after `remove`. Host only."""
        params = sampling_params(start)
        edits = _bias_edits(params) + _stop_edits(start) + _word_edits(params)
        edits = [edit for edit in edits if all(0 <= token < self._vocab_size for token in (edit[0], *edit[4:]))]
        if len(edits) > MAX_EDITS or any(len(edit) > FIXED_COLUMNS + MAX_BEFORE for edit in edits):
            self.too_large.add(row)
            return
        self._counts.set(row, len(edits))
        if edits:
            lines = np.full((len(edits), self.edits.shape[2]), _ANY, dtype=np.int32)
            for line, edit in zip(lines, edits, strict=True):
                line[: len(edit)] = edit
            self._staged_edits[row] = lines
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._penalties.set(row, *penalties)
        if edits or penalties != (0.0, 0.0, 1.0) or params.allowed_token_ids is not None:
            self.shaped.add(row)
        if params.allowed_token_ids is not None:
            self._allowing.add(row)
            self._staged_masks[row] = _mask_of(params.allowed_token_ids, self._vocab_size)

    def remove(self, row: int) -> None:
        for rows in (self.shaped, self.too_large, self._allowing):
            rows.discard(row)
        self._staged_edits.pop(row, None)
        self._staged_masks.pop(row, None)

    def apply_staged_writes(self) -> None:
        self._counts.flush()
        self._penalties.flush()
        device = self.edits.device
        for row, lines in self._staged_edits.items():
            self.edits[row, : len(lines)] = upload_array(lines, device)
        self._staged_edits.clear()
        if self._staged_masks:
            order = upload(list(self._staged_masks), device, torch.int64)
            masks = upload_array(np.stack(list(self._staged_masks.values())), device)
            self._masks.of_kind(_KIND).index_copy_(0, order, masks)
            self._staged_masks.clear()
        if self._allowing != self._lined_up:
            self._lined_up = set(self._allowing)
            self._masks.line_up(_KIND, {row: row for row in self._allowing})


Edit = tuple[int, ...]
"""A token, the bits of what is added to its logit, how many outputs are too many, how many are needed, and which
tokens come before, the last first."""


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


_BAN = _bits(-np.inf)


def _bias_edits(params: SamplingParams) -> list[Edit]:
    with np.errstate(over="ignore"):  # what is infinite in float32 is told by its row
        return [(token, _bits(bias), _ALWAYS, 0) for token, bias in (params.logit_bias or {}).items()]


def _stop_edits(start: RowStart) -> list[Edit]:
    params = sampling_params(start)
    if params.min_tokens <= len(start.token_ids) - start.num_prompt_tokens:
        return []
    stops = sorted({*start.eos_token_ids, *params.stop_token_ids})
    return [(token, _BAN, params.min_tokens, 0) for token in stops]


def _word_edits(params: SamplingParams) -> list[Edit]:
    words = [word for word in params.bad_words_token_ids if word]
    return [(word[-1], _BAN, _ALWAYS, len(word) - 1, *reversed(word[:-1])) for word in words]


def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
    mask = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    tokens = np.array([token for token in token_ids if 0 <= token < vocab_size], dtype=np.int64)
    np.bitwise_or.at(mask, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    return mask.view(np.int32)
