"""DraftCosts: what drafts add to a step, as a part of the steps without any that came shortly before.

Only this ratio counts, and it holds on a machine whose speed wanders: both kinds of steps are measured side by side.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from quire.sched.step_times import StepTimes, StepWork

_GAIN = 0.15  # part of an estimate that a measurement replaces
_SPIKE = 1.5  # measured over expected: other work on the machine, unless the next such step is as slow
_CHARGED = 3.0  # measured over expected that is charged: a stalled machine is not what drafts cost
_TOO_FAST = -0.15  # added by drafts: then one of the steps that this was compared with was a spike
_FIRST = 2  # drafts of the first step that verifies any, or one for four rows; each time twice as many are tried
_COMPARED = 5  # the last steps without drafts, whose median counts
_UNKNOWN = 3  # of these come first, so that there is something to compare with


class _Mean:
    """An average that forgets. Its first two values may be spikes: the smaller one counts."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count == 2:
            self.value = min(self.value, value)
        else:
            self.value += max(_GAIN, 1.0 / self.count) * (value - self.value)


class DraftCosts:
    """Steps without drafts that a draft adds, by the sizes of batch and drafts as powers of two.

    The cost is neither linear nor smooth, and on a GPU most of it is that of verifying anything. So what was never
    tried is believed to cost as if drafts went on to add what the last doubling did, and is tried in small steps.
    """

    def __init__(self, times: StepTimes) -> None:
        """`times` is for this object alone: it learns from steps that only decode, and compares batches with it."""
        self._times = times
        self._plain: deque[tuple[int, float]] = deque(maxlen=_COMPARED)  # rows and seconds
        self._extra: dict[tuple[int, int], _Mean] = {}  # rows and drafts, as powers of two -> what each draft adds
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}  # the same -> believed in a step: in all, each
        self._was_spike = False

    def extra(self, rows: int, num_drafts: int) -> float:
        """Steps without drafts that this number of drafts adds to one of these rows."""
        key = rows.bit_length(), num_drafts.bit_length()
        fixed, each = self._lines.get(key) or self._lines.setdefault(key, self._line(rows, *key))
        return fixed + num_drafts * each

    def most(self, rows: int) -> int:
        """How many drafts may be tried now."""
        self._lines.clear()
        return max(self.first(rows), 2 * self.tried(rows) + 1) if len(self._plain) >= _UNKNOWN else 0

    def tried(self, rows: int) -> int:
        """The largest number of drafts whose cost is known from measurements."""
        return (1 << max((size for batch, size in self._extra if batch == rows.bit_length()), default=0)) - 1

    def first(self, rows: int) -> int:
        """A number of drafts that is enough to measure what they add, and not more."""
        return max(_FIRST, rows // 4)

    def measured(self, rows: int, num_drafts: int, seconds: float) -> float:
        """A step of these rows and drafts, and nothing else, took `seconds`. Returns what its drafts added."""
        if not num_drafts:
            self._times.measured(StepWork(rows), seconds)
            self._plain.append((rows, seconds))
        if not num_drafts or len(self._plain) < _UNKNOWN:
            return 0.0
        speed = median(taken / self._times.of(StepWork(count)) for count, taken in self._plain)
        found = seconds / (speed * self._times.of(StepWork(rows))) - 1.0
        if found < _TOO_FAST:
            self._plain.remove(max(self._plain, key=lambda step: step[1] / self._times.of(StepWork(step[0]))))
        expected = self.extra(rows, num_drafts)
        most = _SPIKE * (1.0 + expected) - 1.0
        is_spike = found > most
        if is_spike and not self._was_spike:
            found = most
        self._was_spike = is_spike
        self._extra.setdefault((rows.bit_length(), num_drafts.bit_length()), _Mean()).add(found / num_drafts)
        found = min(found, _CHARGED * (1.0 + expected) - 1.0)
        return max(0.0, found)  # no draft makes a step faster: the machine has become so since

    def _line(self, rows: int, batch: int, size: int) -> tuple[float, float]:
        """What is added by drafts of a size whatever their number, and by each."""
        found = [(1 << known) - 1 for known in range(size, 0, -1) if (batch, known) in self._extra]
        if not found:
            return 0.0, self._times.of(StepWork(rows, 1)) / self._times.of(StepWork(rows)) - 1.0
        each = [max(0.0, self._extra[batch, count.bit_length()].value) for count in found[:2]]
        if found[0].bit_length() == size:
            return 0.0, each[0]
        last = found[0] * each[0]
        slope = max(0.0, (last - found[1] * each[1]) / (found[0] - found[1])) if len(found) > 1 else 0.0
        return last - slope * found[0], slope
