"""Repetition detection: whether an output ends in one pattern several times in a row. Knows token ids only."""

from __future__ import annotations

from collections import deque

from quire.types.sampling import RepetitionDetectionParams


class RepetitionDetector:
    """Sees each token of one output once. A token costs at most max_pattern_size look-ups, however long the output.

    The output ends in `count` copies of a pattern of length d exactly when each of its last `d * (count - 1)` tokens
    equals the token d places before it. So for each distance d it is enough to know for how many tokens in a row that
    has been true: the run at this distance.
    """

    __slots__ = ("_last", "_max_size", "_min_count", "_min_size", "_num_tokens", "_places", "_runs")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._max_size = params.max_pattern_size
        self._min_size = max(1, params.min_pattern_size)
        self._min_count = params.min_count
        self._num_tokens = 0
        self._last: deque[int] = deque()  # the tokens that a pattern can still reach back to
        self._places: dict[int, deque[int]] = {}  # by token: where it stands among them, newest first
        self._runs: dict[int, int] = {}  # by distance; those without a run are left out

    def add(self, token: int) -> bool:
        """Whether the output repeats itself now that this token is its last."""
        here = self._num_tokens
        self._num_tokens += 1
        places = self._places.setdefault(token, deque())
        before = self._runs
        runs = self._runs = {
            distance: before.get(distance, 0) + 1 for place in places if (distance := here - place) >= self._min_size
        }
        places.appendleft(here)
        self._last.append(token)
        if len(self._last) > self._max_size:
            self._forget_oldest()
        return any(run >= distance * (self._min_count - 1) for distance, run in runs.items())

    def _forget_oldest(self) -> None:
        oldest = self._last.popleft()
        places = self._places[oldest]
        places.pop()
        if not places:
            del self._places[oldest]
