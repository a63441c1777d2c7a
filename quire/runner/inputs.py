"""StepInputs: what a step knows of its rows, packed into one buffer that goes to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.platform.transfer import StagedBytes
from quire.runner.step import PlannedTokens

_Integers = NDArray[np.signedinteger[Any]]
_Array = TypeVar("_Array", Tensor, _Integers)


@dataclass(frozen=True, slots=True)
class InputLists(Generic[_Array]):
    """Parts of the buffer, each with its own padding."""

    rows: _Array  # [max_rows] int64
    sample_tokens: _Array  # [max_samples] int64: index of each token that is sampled from
    sample_rows: _Array  # [max_samples] int64
    contexts: _Array  # [max_rows] int32
    attended: _Array  # [max_rows] int32
    query_starts: _Array  # [max_rows + 1] int32
    sample_contexts: _Array  # [max_samples] int32
    ahead: _Array  # [max_samples] int32: of steps with drafts, see SamplePositions
    drafts: _Array  # [max_samples] int32
    work: tuple[_Array, ...]  # int32: what the attention backend's kernels read, see WorkPlan


class StepInputs:
    """The lists of steps of one size, on the host and where the step reads them."""

    def __init__(
        self, max_rows: int, max_samples: int, work: tuple[int, ...], scratch_row: int, device: torch.device
    ) -> None:
        """`work`: the length of each of the backend's lists."""
        self.max_rows, self.max_samples = max_rows, max_samples
        self._work, self._scratch_row = work, scratch_row
        wide = max_rows + 2 * max_samples
        narrow = 3 * max_rows + 1 + 3 * max_samples + sum(work)
        self._buffer = StagedBytes(8 * wide + 4 * narrow, device)
        host: NDArray[np.uint8] = self._buffer.host.numpy()
        host_wide: _Integers = host[: 8 * wide].view(np.int64)
        host_narrow: _Integers = host[8 * wide :].view(np.int32)
        self._host = self._cut(host_wide, host_narrow)
        there = self._buffer.device
        self.lists = self._cut(there[: 8 * wide].view(torch.int64), there[8 * wide :].view(torch.int32))

    def _cut(self, wide: _Array, narrow: _Array) -> InputLists[_Array]:
        rows, samples, end = self.max_rows, self.max_samples, 3 * self.max_rows + 1
        firsts = accumulate(self._work, initial=end + 3 * samples)
        work = [narrow[first : first + length] for first, length in zip(firsts, self._work, strict=False)]
        return InputLists(
            rows=wide[:rows],
            sample_tokens=wide[rows : rows + samples],
            sample_rows=wide[rows + samples :],
            contexts=narrow[:rows],
            attended=narrow[rows : 2 * rows],
            query_starts=narrow[2 * rows : end],
            sample_contexts=narrow[end : end + samples],
            ahead=narrow[end + samples : end + 2 * samples],
            drafts=narrow[end + 2 * samples : end + 3 * samples],
            work=tuple(work),
        )

    def has_room_for(self, num_rows: int, work: tuple[list[int], ...]) -> bool:
        return num_rows <= self.max_rows and all(
            len(values) <= room for values, room in zip(work, self._work, strict=True)
        )

    def load(
        self, rows: list[int], tokens: PlannedTokens, work: tuple[list[int], ...], places_drafts: bool = False
    ) -> None:
        """Send what the next step knows of its rows to the device. Does not wait."""
        lists = self._host
        _put(lists.rows, rows, self._scratch_row)
        samples = tokens.samples
        _put(lists.sample_tokens, samples.tokens, 0)
        _put(lists.sample_rows, samples.rows, self._scratch_row)
        _put(lists.contexts, tokens.contexts, 1)
        _put(lists.attended, tokens.attended or tokens.contexts, 1)
        _put(lists.query_starts, tokens.starts, tokens.total)
        _put(lists.sample_contexts, samples.lengths, 1)
        if places_drafts:
            _put(lists.ahead, samples.ahead, 0)
            _put(lists.drafts, samples.drafts, -1)
        for part, values in zip(lists.work, work, strict=True):
            _put(part, values, -1)
        self._buffer.send()


def _put(part: _Integers, values: list[int], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding
