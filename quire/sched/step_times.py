"""StepTimes: predicts how long a step takes, from the steps that were measured. Knows counts and seconds only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

_GAIN = 0.3  # part of a prediction's error that one measurement removes
_LARGEST_ERROR = 3.0  # of what was predicted; a larger one counts as this one
_SPIKE = 4.0  # measured over predicted: a compilation or a page fault, unless the next step is as slow
_SMALLEST = 1e-12  # seconds; a term that reached zero could not grow again


class Prior(NamedTuple):
    """What is believed before the first measurement. Seconds; only their ratios survive that measurement."""

    fixed: float = 0.008
    per_row: float = 0.002
    per_token: float = 0.001
    per_pair: float = 5e-7


class StepWork(NamedTuple):
    """What a step computes: rows that decode, prompt tokens, and pairs of a prompt token and a token before it.

    Drafts cost what prompt tokens do, and count as such.
    """

    rows: int
    prompt_tokens: int = 0
    pairs: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.rows + self.prompt_tokens


def pairs_of(start: int, num_tokens: int, tile: int = 1) -> float:
    """Pairs of tokens that attention computes for `num_tokens` after `start` computed ones, in tiles of queries.

    More than half a tile costs whole tiles. Less of one is split over more programs, which costs a sixth of a tile
    (H200, tile of 128 at 100,000 keys: 16 tokens cost what 42 do, 32: 52, 48: 67, 64: 85, 96 to 128: 128).
    """
    computed = num_tokens
    if tile > 1 and num_tokens:
        computed = -(-num_tokens // tile) * tile if 2 * num_tokens > tile else num_tokens + tile // 6
    return computed * (start + 0.5 * num_tokens)


class StepTimes:
    """seconds = fixed + per_row * rows + per_token * prompt tokens + per_pair * pairs, every factor above 0.

    A measurement moves each factor by its part in the prediction, so memory is four numbers and the old is forgotten.
    The first measurements move all factors alike: how fast model and machine are is what a prior knows least.
    """

    def __init__(self, prior: Prior | None = None, sizes: Sequence[int] = (), tile: int = 1) -> None:
        """`sizes`: numbers of tokens that mixed steps are padded to, up to the largest of them.

        `tile`: queries that a kernel of attention computes together.
        """
        self.tile = tile
        self._factors = list(prior or Prior())
        self._sizes = sizes
        self._num_measured = 0
        self._last_was_spike = False

    def of(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        fixed, per_row, per_token, per_pair = self._factors
        return (
            fixed
            + per_row * work.rows
            + per_token * self._padded(work.rows, work.prompt_tokens)
            + per_pair * work.pairs
        )

    def measured(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        factors = self._factors
        padded = self._padded(work.rows, work.prompt_tokens)
        terms = (factors[0], factors[1] * work.rows, factors[2] * padded, factors[3] * work.pairs)
        predicted = sum(terms)
        spike = seconds > _SPIKE * predicted
        if spike and not self._last_was_spike:
            self._last_was_spike = True
            return
        self._last_was_spike = spike
        error = min(seconds / predicted - 1.0, _LARGEST_ERROR)
        self._num_measured += 1
        common = 1.0 / self._num_measured
        squares = sum(term * term for term in terms)
        scale = _GAIN * predicted / squares
        for index, term in enumerate(terms):
            weight = min(1.0, max(common, scale * term))
            factors[index] = max(_SMALLEST, factors[index] * (1.0 + error * weight))

    def plus(self, work: StepWork, start: int, num_tokens: int) -> StepWork:
        """Return `work` and `num_tokens` of another prompt that has `start` computed ones."""
        pairs = work.pairs + pairs_of(start, num_tokens, self.tile)
        return StepWork(work.rows, work.prompt_tokens + num_tokens, pairs)

    def fitting(self, work: StepWork, start: int, limit: float) -> int:
        """How many tokens more, of a prompt with `start` computed ones, a step of `limit` seconds has time for.

        Where steps are padded or attention has tiles, the number with the most tokens a second.
        """
        per_token, per_pair = self._factors[2:]
        spent = self.of(work)
        room = limit - spent
        if room <= 0.0:
            return 0
        sizes, taken = self._sizes, work.rows + work.prompt_tokens
        most = self._in_tiles(_solve(per_token, per_pair, start, room))
        if not sizes or taken >= sizes[-1]:
            return most
        padded = self._padded(work.rows, work.prompt_tokens)
        best, best_rate = 0, 0.0
        for size in sizes[bisect_left(sizes, taken + 1) :]:
            padding = per_token * (size - work.rows - padded)
            if padding >= room:
                break
            count = min(size - taken, self._in_tiles(_solve(0.0, per_pair, start, room - padding)))
            rate = count / (spent + padding + per_pair * pairs_of(start, count, self.tile))
            if rate > best_rate:
                best, best_rate = count, rate
        return most if taken + most > sizes[-1] else best

    def most(self, work: StepWork, limit: float) -> int:
        """A number of tokens of a new prompt that is not less than those that `limit` seconds have time for."""
        fixed, per_row, per_token, per_pair = self._factors
        spent = fixed + per_row * work.rows + per_token * work.prompt_tokens + per_pair * work.pairs
        return 1 + _solve(per_token, per_pair, 0, max(0.0, limit - spent))

    def _in_tiles(self, count: int) -> int:
        """How many tokens cost no more than `count` would without tiles."""
        tile = self.tile
        if tile == 1:
            return count
        return count // tile * tile if count >= tile else max(0, min(count - tile // 6, tile // 2))

    def _padded(self, rows: int, prompt_tokens: int) -> int:
        sizes, total = self._sizes, rows + prompt_tokens
        if not prompt_tokens or not sizes or total > sizes[-1]:
            return prompt_tokens
        return sizes[bisect_left(sizes, total)] - rows


def _solve(per_token: float, per_pair: float, start: int, room: float) -> int:
    """The largest n with per_token * n + per_pair * pairs_of(start, n) <= room."""
    slope = per_token + per_pair * start
    return int(2.0 * room / (slope + sqrt(slope * slope + 2.0 * per_pair * room)))
