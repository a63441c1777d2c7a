"""What the server remembers for the console: rates, latencies, ended requests, restarts and the tail of the log.

All of it is bounded, and cheap enough to go on while nobody looks. Holds numbers and names, never a prompt.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from quire.engine.child import TakeLine
from quire.metrics.stats import EngineCounters, Observer, RequestEnd, TokenEvent
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineStats

HISTORY_SECONDS = 600
_LATENCY_WINDOW = 60.0  # seconds
_MOST_LATENCIES = 4096
_LEAST_SPAN = 0.05  # seconds over which a rate means anything
_MOST_ENDED = 200
_MOST_LINES = 400
_LONGEST_LINE = 2000
_MOST_RESTARTS = 50
_PROMPT_LOGGER = "quire.server.generation.run"  # writes prompts, with --log-requests

Line = tuple[float, str, str]
T = TypeVar("T")
Restart = tuple[float, str, int]


class Percentiles(msgspec.Struct, frozen=True):
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    count: int = 0


class Ended(msgspec.Struct, frozen=True):
    """A request that has ended. Latencies are in seconds, None where there is none."""

    id: str
    at: float
    since: float
    reason: str
    num_prompt_tokens: int
    num_cached: int | None
    num_tokens: int
    queue: float | None
    ttft: float | None
    itl: float | None
    error: str | None


class Load(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    prefilling: int
    prefill_tokens_left: int
    kv_usage: float
    prompt_rate: float
    generation_rate: float
    ttft: Percentiles
    itl: Percentiles
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    finished: int
    num_restarts: int


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A second in which something happened."""

    at: float
    prompt_rate: float
    generation_rate: float
    running: int
    waiting: int
    kv_usage: float


class Marks(msgspec.Struct):
    """How far a reader has come, to be told only what is new."""

    at: float = 0.0
    generated: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    lines: int = 0
    restarts: int = 0


class LogTail(logging.Handler):
    """The last lines of the log, of this process and of the engine's."""

    def __init__(self, *, shows_text: bool = False) -> None:
        super().__init__()
        self.lines: deque[Line] = deque(maxlen=_MOST_LINES)
        self.count = 0
        self._shows_text = shows_text

    def emit(self, record: logging.LogRecord) -> None:
        if self._shows_text or record.name != _PROMPT_LOGGER:
            self._add(record.created, record.levelname[0], record.getMessage())

    def tee(self, take_line: TakeLine) -> TakeLine:
        """A reader of the engine's lines that remembers what it passes on."""

        def take(line: str) -> None:
            take_line(line)
            head, level, text = line[:8], line[9:10], line[11:].rstrip()  # as quire.utils.log writes it
            is_ours = head[2:3] == ":" and level in "DIWE" and text
            self._add(time.time(), level if is_ours else "I", text if is_ours else line.rstrip())

        return take

    def _add(self, at: float, level: str, text: str) -> None:
        self.lines.append((at, level, text[:_LONGEST_LINE]))
        self.count += 1


class ConsoleMonitor(Observer):
    """Hears the one stream of events; see quire/metrics/stats.py. Told on the event loop."""

    def __init__(self, *, shows_text: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.log = LogTail(shows_text=shows_text)
        self.num_starts = 0
        self._clock = clock
        self._stats = EngineStats()
        self._counters = EngineCounters()
        self._generated = 0
        self._finished = 0
        self._history: deque[Sample] = deque(maxlen=HISTORY_SECONDS)
        self._second = Marks()
        self._ttft: deque[tuple[float, float, int]] = deque(maxlen=_MOST_LATENCIES)  # at, seconds, how often
        self._itl: deque[tuple[float, float, int]] = deque(maxlen=_MOST_LATENCIES)
        self._ended: deque[Ended] = deque(maxlen=_MOST_ENDED)
        self._num_ended = 0
        self._restarts: deque[Restart] = deque(maxlen=_MOST_RESTARTS)
        self._num_restart_events = 0

    def on_stats(self, stats: EngineStats) -> None:
        self._tick()
        self._stats = stats
        self._counters.add(stats)

    def on_tokens(self, event: TokenEvent) -> None:
        self._generated += event.num_generation_tokens
        now = self._clock()
        self._ttft.extend((now, seconds, 1) for seconds in event.first_token_latencies)
        self._itl.extend((now, seconds, count) for seconds, count in event.token_latencies.items())

    def on_request_end(self, event: RequestEnd) -> None:
        now, end = self._clock(), event.finished_time
        num_tokens = event.num_generation_tokens
        spans = [
            (one.last_token_time - one.first_token_time, one.num_tokens - 1)
            for one in event.completions
            if one.first_token_time is not None and one.last_token_time is not None
        ]
        seconds, steps = sum(span for span, _ in spans), sum(count for _, count in spans)
        first = event.first_token_time
        self._finished += 1
        self._num_ended += 1
        self._ended.append(
            Ended(
                event.request_id,
                now,
                now - (end - event.arrival_time),
                "error" if event.error else ", ".join(dict.fromkeys(one.finish_reason for one in event.completions)),
                event.num_prompt_tokens,
                event.num_cached_tokens,
                num_tokens,
                event.queue_time,
                None if first is None else first - event.arrival_time,
                seconds / steps if steps else None,
                event.error,
            )
        )

    def on_engine_down(self) -> None:
        self._stats = EngineStats()
        self._counters.restart()
        self._note_restart("down", 0)

    def on_engine_start(self, info: EngineInfo) -> None:
        self.num_starts += 1
        self._stats = EngineStats()
        self._counters.restart()
        self._note_restart("ready", 0)

    def on_resume(self, num_requests: int) -> None:
        self._note_restart("resumed", num_requests)

    def history(self) -> list[Sample]:
        oldest = self._clock() - HISTORY_SECONDS
        return [sample for sample in self._history if sample.at >= oldest]

    def begin(self, most_lines: int = _MOST_LINES) -> tuple[Marks, list[Ended], list[Line], list[Restart]]:
        """Where a reader begins, and what happened before."""
        marks = Marks(self._clock(), self._generated, self._counters.prompt_tokens)
        ended, lines, restarts = self.news(marks)
        return marks, ended, lines[-most_lines:], restarts

    def load(self, marks: Marks) -> Load:
        """How it goes, with rates since `marks`, which move on."""
        now, stats, counters = self._clock(), self._stats, self._counters
        seconds = now - marks.at
        prompt_rate = generation_rate = 0.0
        if seconds >= _LEAST_SPAN:
            prompt_rate = (counters.prompt_tokens - marks.prompt_tokens) / seconds
            generation_rate = (self._generated - marks.generated) / seconds
            marks.at, marks.generated, marks.prompt_tokens = now, self._generated, counters.prompt_tokens
        return Load(
            stats.num_running,
            stats.num_waiting,
            stats.num_prefilling,
            stats.prefill_tokens_left,
            round(stats.kv_cache_usage, 4),
            round(prompt_rate, 1),
            round(generation_rate, 1),
            percentiles(self._ttft, now),
            percentiles(self._itl, now),
            counters.prefix_queries,
            counters.prefix_hits,
            counters.num_preemptions,
            self._finished,
            max(0, self.num_starts - 1),
        )

    def news(self, marks: Marks) -> tuple[list[Ended], list[Line], list[Restart]]:
        """What ended, was logged and happened to the engine since `marks`, which move on."""
        ended = _last(self._ended, self._num_ended - marks.ended)
        lines = _last(self.log.lines, self.log.count - marks.lines)
        restarts = _last(self._restarts, self._num_restart_events - marks.restarts)
        marks.ended, marks.lines, marks.restarts = self._num_ended, self.log.count, self._num_restart_events
        return ended, lines, restarts

    def _note_restart(self, kind: str, num_requests: int) -> None:
        self._restarts.append((self._clock(), kind, num_requests))
        self._num_restart_events += 1

    def _tick(self) -> None:
        """Close the second that has passed since the last sample, if one has."""
        now, second = self._clock(), self._second
        seconds = now - second.at
        if seconds < 1.0:
            return
        stats, prompt_tokens = self._stats, self._counters.prompt_tokens
        if seconds < 3.0:  # else nothing happened meanwhile, and this is the first event of another stretch
            self._history.append(
                Sample(
                    round(now, 2),
                    round((prompt_tokens - second.prompt_tokens) / seconds, 1),
                    round((self._generated - second.generated) / seconds, 1),
                    stats.num_running,
                    stats.num_waiting,
                    round(stats.kv_cache_usage, 4),
                )
            )
        second.at, second.generated, second.prompt_tokens = now, self._generated, prompt_tokens


def percentiles(found: Iterable[tuple[float, float, int]], now: float) -> Percentiles:
    """Of (at, seconds, how often) within the last minute."""
    recent = sorted((seconds, count) for at, seconds, count in found if now - at <= _LATENCY_WINDOW)
    total = sum(count for _, count in recent)
    if not total:
        return Percentiles()
    p50, p90, p99 = (_percentile(recent, math.ceil(total * share)) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, total)


def _percentile(recent: Sequence[tuple[float, int]], rank: int) -> float:
    for seconds, count in recent:
        rank -= count
        if rank <= 0:
            return round(seconds, 6)
    return round(recent[-1][0], 6)


def _last(items: deque[T], count: int) -> list[T]:
    return list(items)[-count:] if count > 0 else []
