"""Grammar masks: tokens that a request's grammar does not allow next become impossible.

The masks lie in a permanent buffer and are loaded for one step at a time. Applied after every other change of the
logits, so that no bias brings back what the grammar forbids.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.platform.transfer import upload
from quire.types.masks import Masks
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.mask_buffer import MaskBuffer

KIND = 0  # of the buffer's lines


class GrammarMasks:
    def __init__(self, vocab_size: int, buffer: MaskBuffer) -> None:
        self._vocab_size = vocab_size
        self._buffer = buffer
        # [256] int64: the eight flags of a byte, lowest bit first, as eight bytes.
        flags = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        self._flags = flags.to(torch.bool).view(torch.int64).flatten().to(buffer.masks.device)
        self._lines: dict[int, int] = {}  # row -> line of the buffer
        self._lined_up: dict[int, int] = {}  # what the buffer was last told

    def load(self, rows: Iterable[int], masks: Masks) -> None:
        """Have masks ready for the next sampling, a line for each of the rows. Does not wait for the device."""
        self._buffer.stage(masks)
        self._lines = {row: line for line, row in enumerate(rows)}
        if self._lines != self._lined_up:
            self._lined_up = self._lines
            self._buffer.line_up(KIND, self._lines)

    @property
    def loaded(self) -> bool:
        return bool(self._lines)

    def clear(self) -> None:
        """No row has a mask any more."""
        self._lines = {}

    def apply(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Change logits [m, vocab_size] in place. No sync."""
        if not self._lines:
            return logits
        self._buffer.copy_staged(KIND, len(self._lines))
        places = [place for place, row in enumerate(rows.row_list) if row in self._lines]
        lines = [self._lines[rows.row_list[place]] for place in places]
        banned = ~self._allowed(upload(lines, logits.device, torch.int64))
        if len(places) == len(rows.row_list):
            return logits.masked_fill_(banned, -torch.inf)
        index = upload(places, logits.device, torch.int64)
        return logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(banned, -torch.inf))

    def _allowed(self, lines: Tensor) -> Tensor:
        """[n, vocab_size] bool"""
        octets = self._buffer.masks.index_select(0, lines).view(torch.uint8)
        flags = self._flags.index_select(0, octets.flatten().to(torch.int32))
        return flags.view(len(lines), -1).view(torch.bool)[:, : self._vocab_size]
