"""Masks where ops read them: lines of bits, and which of them each row has to obey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from quire.platform.transfer import Staging, refresh, upload, upload_array
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.masks import Masks

GRAMMAR, ALLOWED = 0, 1  # kinds of lines: of grammars, which are staged, and of allowed_token_ids


class MaskBuffer:
    """Two kinds of masks: those of a step's sample positions, which are staged, and one a row, which stays."""

    def __init__(self, vocab_size: int, max_rows: int, max_samples: int, device: torch.device) -> None:
        self._firsts = (0, max_samples)  # line of each kind
        self.masks = torch.zeros(max_samples + max_rows, mask_words(vocab_size), dtype=torch.int32, device=device)
        """[max_samples + max_rows, words], always the same tensor."""
        # One more row, for the padding of a batch.
        self._host_lines = np.full((2, max_rows + 1), -1, dtype=np.int32)
        self.lines = torch.from_numpy(self._host_lines).to(device)
        """[2, max_rows + 1], the same tensor too: the lines of `masks` for each row, -1 for none."""
        self._lined_up: list[dict[int, int]] = [{}, {}]  # of each kind, row -> line, as last told
        self._staging = Staging(self.masks[:max_samples])  # of the first kind
        self._room: Masks = self._staging.host.numpy()

    @staticmethod
    def contributes(sizes: EngineSizes) -> Iterable[LedgerLine]:
        num_bytes = sizes.max_num_samples * mask_words(sizes.vocab_size) * 4
        yield LedgerLine("masks", num_bytes, "which tokens a request may have, a bit each")

    def write(self, kind: int, rows: list[int], masks: NDArray[np.int32]) -> None:
        """Masks [n, words] of these rows, which stay until they are written again. Does not wait."""
        order = upload([self._firsts[kind] + row for row in rows], self.masks.device, torch.int64)
        self.masks.index_copy_(0, order, upload_array(masks, self.masks.device))

    def room(self, count: int) -> Masks:
        """[count, words] on the host, always the same memory: where masks are best made for `load`."""
        return self._room[:count]

    def load(self, lines: Mapping[int, int], masks: Masks) -> None:
        """Have the masks of grammars ready for `copy_staged`; `lines` are those of the rows. Does not wait.

        No step that copied others is still under way.
        """
        if masks.ctypes.data != self._room.ctypes.data:
            self._room[: len(masks)] = masks
        self.line_up(GRAMMAR, lines)

    def copy_staged(self, count: int) -> None:
        """Copy this number of masks into the first lines of the first kind. Does not wait, and may be captured."""
        self._staging.copy(count)

    def line_up(self, kind: int, places: Mapping[int, int]) -> None:
        """Say which rows have a mask of this kind, and in which of its lines."""
        if places == self._lined_up[kind]:
            return
        self._lined_up[kind] = dict(places)
        lines = self._host_lines[kind]
        lines[:] = -1
        lines[list(places)] = [self._firsts[kind] + place for place in places.values()]
        refresh(self.lines, torch.from_numpy(self._host_lines))


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
