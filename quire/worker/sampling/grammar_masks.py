"""Grammar masks: tokens that a request's grammar does not allow next become impossible.

The masks lie in a permanent buffer, a slot per row, and are loaded for one step at a time. Applied after every other
change of the logits, so that no bias brings back what the grammar forbids.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.platform.transfer import upload
from quire.types.masks import Masks
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.mask_buffer import MaskBuffer

_KIND = 0  # of the buffer's lines


class GrammarMasks:
    def __init__(self, vocab_size: int, buffer: MaskBuffer) -> None:
        self._vocab_size = vocab_size
        self._buffer = buffer
        # [256] int64: the eight flags of a byte, lowest bit first, as eight bytes.
        flags = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        self._flags = flags.to(torch.bool).view(torch.int64).flatten().to(buffer.masks.device)
        self._slots: Mapping[int, int] = {}
        self._lined_up: Mapping[int, int] = {}  # what the buffer was last told

    def load(self, slots: Mapping[int, int], masks: Masks) -> None:
        """Masks for the next sampling: line i is that of the i-th row of `slots`. Does not wait for the device."""
        self._buffer.write(_KIND, list(slots.values()), masks)
        if slots != self._lined_up:
            self._lined_up = dict(slots)
            self._buffer.line_up(_KIND, slots)
        self._slots = slots

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
        octets = self._buffer.masks.index_select(0, slots).view(torch.uint8)
        flags = self._flags.index_select(0, octets.flatten().to(torch.int32))
        return flags.view(len(slots), -1).view(torch.bool)[:, : self._vocab_size]
