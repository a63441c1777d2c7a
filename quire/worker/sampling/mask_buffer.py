"""Masks where recorded steps can read them: lines of bits, and which of them each row has to obey."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.platform.transfer import EarlyCopies, host_array, refresh, upload, upload_array
from quire.types.masks import Masks


class MaskBuffer:
    """`kinds` masks a row; those of each kind have as many lines as there are rows."""

    def __init__(self, vocab_size: int, max_rows: int, kinds: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._masks = torch.zeros(kinds * max_rows, mask_words(vocab_size), dtype=torch.int32, device=device)
        # One more row, for the padding of a batch.
        self._host_lines = np.full((kinds, max_rows + 1), -1, dtype=np.int32)
        self._lines = torch.from_numpy(self._host_lines).to(device)
        self._copies = EarlyCopies(device)
        self._rooms: list[Masks] = []

    @property
    def masks(self) -> Tensor:
        """[kinds * max_rows, words] int32, always the same tensor."""
        return self._masks

    @property
    def lines(self) -> Tensor:
        """[kinds, max_rows + 1] int32, the same tensor too: the lines of `masks` for each row, -1 for none."""
        return self._lines

    def of_kind(self, kind: int) -> Tensor:
        """[max_rows, words]: a part of `masks`."""
        return self._masks[kind * self._max_rows : (kind + 1) * self._max_rows]

    def room(self, count: int) -> Masks:
        """[count, words]: where masks can be made for `write`. The one after the next is the same again."""
        if not self._rooms:
            shape = (self._max_rows, self._masks.shape[1])
            self._rooms = [host_array(shape, self._masks.device) for _ in range(2)]
        self._rooms.reverse()
        return self._rooms[0][:count]

    def write(self, kind: int, places: list[int], masks: Masks) -> None:
        """Write masks into these lines of a kind; no step that is under way reads them. Does not wait."""
        lines, first, end = self.of_kind(kind), places[0], places[0] + len(places)
        if places == list(range(first, end)):
            self._copies.refresh(lines[first:end], torch.from_numpy(masks))
        else:
            order = upload(places, lines.device, torch.int64)
            lines.index_copy_(0, order, upload_array(masks, lines.device))

    def line_up(self, kind: int, places: Mapping[int, int]) -> None:
        """Say which rows have a mask of this kind, and in which of its lines."""
        lines = self._host_lines[kind]
        lines[:] = -1
        lines[list(places)] = [kind * self._max_rows + place for place in places.values()]
        refresh(self._lines, torch.from_numpy(self._host_lines))


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
