"""DraftCosts: what drafts add to the time of a step, by the steps that verified some and those that verified none."""

from __future__ import annotations

from quire.sched.step_times import StepTimes, StepWork

_GAIN = 0.25  # part of an estimate that a measurement replaces
_SPIKE = 3.0  # measured over expected: a compilation or a page fault, unless the next step is as slow
_FIRST = 2  # drafts of the first step that verifies any; each time twice as many are tried
_UNKNOWN = 3  # steps without drafts that come first, so that there is something to compare with


class _Mean:
    """An average that forgets."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_GAIN, 1.0 / self.count) * (value - self.value)


class DraftCosts:
    """Seconds per draft, by the sizes of batch and drafts as powers of two: the cost is neither linear nor smooth.

    What was never tried is believed to cost what half as many did, and is tried in small steps.
    """

    def __init__(self, times: StepTimes) -> None:
        """`times` is for this object alone: it learns from steps that only decode."""
        self._times = times
        self._plain: dict[int, _Mean] = {}  # rows -> seconds of a step without drafts
        self._extra: dict[tuple[int, int], _Mean] = {}  # rows and drafts, as powers of two -> seconds per draft
        self._was_spike = False

    def plain(self, rows: int) -> float:
        """Seconds of a step that decodes these rows and verifies nothing."""
        mean = self._plain.get(rows)
        return mean.value if mean is not None else self._times.of(StepWork(rows))

    def extra(self, rows: int, num_drafts: int) -> float:
        """Seconds that this number of drafts adds to it."""
        size = num_drafts.bit_length()
        for known in range(size, 0, -1):
            mean = self._extra.get((rows.bit_length(), known))
            if mean is not None:
                return num_drafts * mean.value
        first, second = self._times.of(StepWork(rows)), self._times.of(StepWork(rows, num_drafts))
        return self.plain(rows) * (second / first - 1.0)

    def most(self, rows: int) -> int:
        """How many drafts may be tried now."""
        mean = self._plain.get(rows)
        if not self._extra and (mean is None or mean.count < _UNKNOWN):
            return 0
        largest = max((size for batch, size in self._extra if batch == rows.bit_length()), default=0)
        return max(_FIRST, (2 << largest) - 1)

    def measured(self, rows: int, num_drafts: int, seconds: float) -> None:
        """A step of these rows and drafts, and nothing else, took `seconds`."""
        plain = self.plain(rows)
        expected = plain + (self.extra(rows, num_drafts) if num_drafts else 0.0)
        is_spike = seconds > _SPIKE * expected and bool(self._plain)
        if (
            is_spike
            and not self._was_spike
            and (not num_drafts or (rows.bit_length(), num_drafts.bit_length()) in self._extra)
        ):
            self._was_spike = True
            return
        self._was_spike = False
        if num_drafts:
            mean = self._extra.setdefault((rows.bit_length(), num_drafts.bit_length()), _Mean())
            mean.add(max(0.0, seconds - plain) / num_drafts)
        else:
            self._times.measured(StepWork(rows), seconds)
            self._plain.setdefault(rows, _Mean()).add(seconds)
