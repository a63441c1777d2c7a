"""Grammar masks: tokens that a request's grammar does not allow next become impossible.

The masks lie in a permanent buffer, a slot per row, and are loaded for one step at a time. Applied after every other
change of the logits, so that no bias brings back what the grammar forbids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.platform.transfer import refresh, upload, upload_array
from quire.types.masks import Masks
from quire.worker.sampling.base import SampleRows


class GrammarMasks:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.buffer = torch.zeros(max_rows, mask_words(vocab_size), dtype=torch.int32, device=device)
        # [256] int64: the eight flags of a byte, lowest bit first, as eight bytes.
        flags = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        self._flags = flags.to(torch.bool).view(torch.int64).flatten().to(device)
        # Where the mask of each row is, for recorded steps; one more row, for the padding of a batch.
        self.lines = torch.full((1, max_rows + 1), -1, dtype=torch.int32, device=device)
        self._slots: Mapping[int, int] = {}
        self._lined_up: Mapping[int, int] = {}  # what `lines` says

    def load(self, slots: Mapping[int, int], masks: Masks) -> None:
        """Masks for the next sampling: line i is that of the i-th row of `slots`. Does not wait for the device."""
        order = list(slots.values())
        first, end = order[0], order[0] + len(order)
        if order == list(range(first, end)):
            refresh(self.buffer[first:end], torch.from_numpy(masks))
        else:
            device = self.buffer.device
            self.buffer.index_copy_(0, upload(order, device, torch.int64), upload_array(masks, device))
        self._slots = slots
        if slots != self._lined_up:
            self._line_up(slots)

    def _line_up(self, slots: Mapping[int, int]) -> None:
        lines = np.full(self.lines.shape, -1, dtype=np.int32)
        lines[0, list(slots)] = list(slots.values())
        refresh(self.lines, torch.from_numpy(lines))
        self._lined_up = dict(slots)

    @property
    def loaded(self) -> bool:
        return bool(self._slots)

    def clear(self) -> None:
        """No row has a mask any more."""
        self._slots = {}

    def apply(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Change logits [m, vocab_size] in place. No sync."""
        if not self._slots:
            return logits
        places = [place for place, row in enumerate(rows.row_list) if row in self._slots]
        slots = [self._slots[rows.row_list[place]] for place in places]
        banned = ~self._allowed(upload(slots, logits.device, torch.int64))
        if len(places) == len(rows.row_list):
            return logits.masked_fill_(banned, -torch.inf)
        index = upload(places, logits.device, torch.int64)
        return logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(banned, -torch.inf))

    def _allowed(self, slots: Tensor) -> Tensor:
        """[n, vocab_size] bool"""
        octets = self.buffer.index_select(0, slots).view(torch.uint8)
        flags = self._flags.index_select(0, octets.flatten().to(torch.int32))
        return flags.view(len(slots), -1).view(torch.bool)[:, : self._vocab_size]


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
