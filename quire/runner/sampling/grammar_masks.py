"""Grammar masks: tokens that a request's grammar does not allow next become impossible.

They lie in a permanent buffer and are loaded for one step at a time.
"""

from __future__ import annotations

from quire.runner.sampling.mask_buffer import MaskBuffer
from quire.types.masks import Masks

KIND = 0  # of the mask buffer's lines: those that are staged


class GrammarMasks:
    def __init__(self, buffer: MaskBuffer) -> None:
        self._buffer = buffer
        self._lined_up: dict[int, int] = {}  # row -> line, as the buffer was last told

    def load(self, lines: dict[int, int], masks: Masks) -> None:
        """Have masks ready for the next sampling; `lines` are those of the rows. Does not wait for the device."""
        self._buffer.stage(masks)
        if lines != self._lined_up:
            self._lined_up = dict(lines)
            self._buffer.line_up(KIND, lines)

    def copy(self, count: int) -> None:
        """Bring the first `count` staged masks to where ops read them. May be captured."""
        self._buffer.copy_staged(count)
