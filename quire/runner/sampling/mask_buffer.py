"""Masks where ops read them: lines of bits, and which of them each row has to obey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.platform.transfer import Staging, refresh, upload, upload_array
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.masks import Masks

GRAMMAR, ALLOWED = 0, 1  # kinds of lines: of grammars, which are staged, and of allowed_token_ids


class MaskBuffer:
    """Two kinds of masks: those of a step's sample positions, which are staged, and one a row, which stays."""

    def __init__(self, vocab_size: int, max_rows: int, max_samples: int, device: torch.device) -> None:
        self._firsts = (0, max_samples)  # line of each kind
        self._masks = torch.zeros(max_samples + max_rows, mask_words(vocab_size), dtype=torch.int32, device=device)
        # One more row, for the padding of a batch.
        self._host_lines = np.full((2, max_rows + 1), -1, dtype=np.int32)
        self._lines = torch.from_numpy(self._host_lines).to(device)
        self._staging = Staging(self._masks[:max_samples])  # of the first kind
        self._room: Masks = self._staging.host.numpy()

    @staticmethod
    def contributes(sizes: EngineSizes) -> Iterable[LedgerLine]:
        num_bytes = sizes.max_num_samples * mask_words(sizes.vocab_size) * 4
        yield LedgerLine("masks", num_bytes, "which tokens a request may have, a bit each")

    @property
    def masks(self) -> Tensor:
        """[max_samples + max_rows, words] int32, always the same tensor."""
        return self._masks

    @property
    def lines(self) -> Tensor:
        """[2, max_rows + 1] int32, the same tensor too: the lines of `masks` for each row, -1 for none."""
        return self._lines

    def write(self, kind: int, rows: list[int], masks: NDArray[np.int32]) -> None:
        """Masks [n, words] of these rows, which stay until they are written again. Does not wait."""
        order = upload([self._firsts[kind] + row for row in rows], self._masks.device, torch.int64)
        self._masks.index_copy_(0, order, upload_array(masks, self._masks.device))

    def room(self, count: int) -> Masks:
        """[count, words] on the host, always the same memory: where masks are best made for `stage`."""
        return self._room[:count]

    def stage(self, masks: Masks) -> None:
        """Have masks ready for `copy_staged`. No step that copied others is still under way."""
        if masks.ctypes.data != self._room.ctypes.data:
            self._room[: len(masks)] = masks

    def copy_staged(self, count: int) -> None:
        """Copy this number of masks into the first lines of the first kind. Does not wait, and may be captured."""
        self._staging.copy(count)

    def line_up(self, kind: int, places: Mapping[int, int]) -> None:
        """Say which rows have a mask of this kind, and in which of its lines."""
        lines = self._host_lines[kind]
        lines[:] = -1
        lines[list(places)] = [self._firsts[kind] + place for place in places.values()]
        refresh(self._lines, torch.from_numpy(self._host_lines))


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class GrammarMasks:
    """Tokens that a request's grammar does not allow next become impossible: loaded for one step at a time."""

    def __init__(self, buffer: MaskBuffer) -> None:
        self._buffer = buffer
        self._lined_up: dict[int, int] = {}  # row -> line, as the buffer was last told

    def load(self, lines: dict[int, int], masks: Masks) -> None:
        """Have masks ready for the next sampling; `lines` are those of the rows. Does not wait for the device."""
        self._buffer.stage(masks)
        if lines != self._lined_up:
            self._lined_up = dict(lines)
            self._buffer.line_up(GRAMMAR, lines)

    def copy(self, count: int) -> None:
        """Bring the first `count` staged masks to where ops read them. May be captured."""
        self._buffer.copy_staged(count)
