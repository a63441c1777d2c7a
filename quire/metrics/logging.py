"""StatsLog: one line in the log that says how it goes, once in an interval and only while something happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from quire.metrics.stats import EngineCounters, Observer, RequestEnd, TokenEvent
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineStats
from quire.utils.log import get_logger

logger = get_logger(__name__)

INTERVAL = 10.0


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class StatsLog(Observer):
    """The first event after a quiet time starts a timer; an interval without work stops it, so idling is free.

    Prompt tokens are counted as steps compute them. A step that is longer than an interval is work, too.
    """

    def __init__(
        self,
        interval: float = INTERVAL,
        *,
        name: str = "",
        call_later: CallLater = _call_later,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: of the model, where a server has several."""
        self._interval = interval
        self._name = name
        self._call_later = call_later
        self._clock = clock
        self._timer: Timer | None = None
        self._stats = EngineStats()
        self._counters = EngineCounters()
        self._begin_interval()

    def on_stats(self, stats: EngineStats) -> None:
        self._note()
        self._stats = stats
        self._counters.add(stats)

    def on_tokens(self, event: TokenEvent) -> None:
        self._note()
        self._num_generation_tokens += event.num_generation_tokens
        self._num_first_tokens += len(event.first_token_latencies)
        self._first_token_seconds += sum(event.first_token_latencies)

    def on_request_end(self, event: RequestEnd) -> None:
        self._note()
        for completion in event.completions:
            self._ends[completion.finish_reason] += 1

    def on_engine_down(self) -> None:
        self._stats = EngineStats()
        self._counters.restart()

    def on_engine_start(self, info: EngineInfo) -> None:
        self.on_engine_down()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note(self) -> None:
        """Something happens: comes before it is counted, for it may begin an interval."""
        if self._timer is None:
            self._begin_interval()
            self._timer = self._call_later(self._interval, self._tick)
        self._changed = True

    def _tick(self) -> None:
        self._timer = None
        if not self._changed and not self._stats.num_running and not self._stats.num_waiting:
            return
        fields = self._fields()
        logger.info("%s%s", f"[{self._name}] " if self._name else "", _line(fields), extra={"fields": fields})
        self._begin_interval()
        self._timer = self._call_later(self._interval, self._tick)

    def _begin_interval(self) -> None:
        self._changed = False
        self._begin = self._clock()
        self._num_generation_tokens = 0
        self._num_first_tokens = 0
        self._first_token_seconds = 0.0
        self._ends = {"stop": 0, "length": 0, "repetition": 0, "abort": 0, "error": 0}
        self._queries_before = self._counters.prefix_queries
        self._hits_before = self._counters.prefix_hits
        self._preemptions_before = self._counters.num_preemptions
        self._prompt_tokens_before = self._counters.prompt_tokens

    def _fields(self) -> dict[str, float]:
        """What the interval was like. What has no value in it is left out."""
        seconds = max(self._clock() - self._begin, 1e-9)
        stats, ends = self._stats, self._ends
        fields = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_usage": 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            "prompt_tokens_per_second": (self._counters.prompt_tokens - self._prompt_tokens_before) / seconds,
            "generation_tokens_per_second": self._num_generation_tokens / seconds,
            "finished": ends["stop"] + ends["length"] + ends["repetition"],
            "aborted": ends["abort"],
            "failed": ends["error"],
            "preempted": self._counters.num_preemptions - self._preemptions_before,
        }
        if stats.num_prefilling:
            fields["prefilling"] = stats.num_prefilling
            fields["prefill_tokens_left"] = stats.prefill_tokens_left
        if not self._changed:
            fields["stalled_seconds"] = seconds
        queries = self._counters.prefix_queries - self._queries_before
        if queries:
            fields["prefix_hit_rate"] = (self._counters.prefix_hits - self._hits_before) / queries
        if self._num_first_tokens:
            fields["mean_ttft"] = self._first_token_seconds / self._num_first_tokens
        return {name: round(value, 4) for name, value in fields.items()}


def _line(fields: dict[str, float]) -> str:
    running = f"{fields['running']} running"
    if "prefilling" in fields:
        running += f" ({fields['prefilling']} in prefill, {fields['prefill_tokens_left']} tokens left)"
    parts = [
        f"{running}, {fields['waiting']} waiting, KV {100 * fields['kv_usage']:.1f} %",
        f"prompt {fields['prompt_tokens_per_second']:.1f} tok/s"
        f", generation {fields['generation_tokens_per_second']:.1f} tok/s",
    ]
    if "stalled_seconds" in fields:
        parts.append(f"no step finished in {fields['stalled_seconds']:.0f} s")
    if "mean_ttft" in fields:
        parts.append(f"TTFT {fields['mean_ttft']:.3f} s")
    if "prefix_hit_rate" in fields:
        parts.append(f"prefix hits {100 * fields['prefix_hit_rate']:.1f} %")
    ended = [f"{fields[name]} {name}" for name in ("finished", "aborted", "failed", "preempted") if fields[name]]
    return "; ".join([*parts, ", ".join(ended)] if ended else parts)
