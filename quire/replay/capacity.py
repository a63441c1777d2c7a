"""Capacity: what clients would see of a load on a machine, for one or several settings. Imports no torch."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.engine.setup import SchedulerSetup
from quire.replay.costs import CostTable, StepLoad
from quire.replay.simulate import SimulatedRequest, Simulation
from quire.replay.workload import Arrivals
from quire.sched.scheduler import Scheduler
from quire.sched.step_times import StepWork, pairs_of
from quire.types.errors import ConfigError
from quire.types.outputs import EngineOutputs

PERCENTS = (50, 90, 99)
TUNABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "step_time_target",
    "max_model_len",
    "kv_blocks",
)
_BINS_PER_E = 100  # of the histogram of gaps: each is 1 % wider than the one before
_TIMELINE = 200  # points of a picture
# Rows and prompt tokens of steps that a scheduler has seen, and how often; no step is about half of the one before.
_LEARNT = ((1, 0), (0, 32), (4, 0), (4, 150), (8, 0), (1, 48), (2, 0), (0, 240))
_LESSONS = 12


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation found. Times in milliseconds."""

    settings: dict[str, float]
    completed: int
    refused: int
    refusal: str | None = None  # what the first of those that were refused was told
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    preemptions: int
    peak_kv_use: float
    mean_kv_use: float
    device_busy: float
    peak_running: int
    prefix_hit_rate: float
    cost_per_million: float | None = None  # output tokens, in the currency of the price
    timeline: list[tuple[float, int, int, float]] = []  # seconds, running, waiting, part of KV blocks in use


class _Gaps:
    """Counts of times between two tokens, in logarithmic bins: a million requests have too many to keep."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, count: int = 1) -> None:
        index = round(math.log(max(seconds, 1e-7)) * _BINS_PER_E)
        self._counts[index] = self._counts.get(index, 0) + count
        self.total += count

    def percentiles(self) -> dict[str, float]:
        found: dict[str, float] = {}
        seen, ordered = 0, sorted(self._counts.items())
        wanted = list(PERCENTS)
        for index, count in ordered:
            seen += count
            while wanted and seen >= self.total * wanted[0] / 100:
                found[f"p{wanted.pop(0)}"] = 1000 * math.exp(index / _BINS_PER_E)
        return found


class _Meter:
    """Gathers what clients see while a simulation runs."""

    def __init__(self) -> None:
        self.gaps = _Gaps()
        self.ttft, self.e2e = array("d"), array("d")
        self.completed = self.refused = self.output_tokens = self.peak_running = 0
        self.refusal: str | None = None
        self.peak_kv = self._kv_seconds = self._last = 0.0
        self.timeline: list[tuple[float, int, int, float]] = []
        self._every, self._count = 1, 0

    def on_step(self, now: float, outputs: EngineOutputs, open_requests: dict[str, SimulatedRequest]) -> None:
        interval, steady = now - self._last, 0
        for output in outputs.outputs:
            one = open_requests[output.request_id]
            if one.first is None or not output.token_ids:
                continue
            if one.last == self._last:
                steady += 1
            else:
                self.gaps.add(now - one.last)
        if steady:
            self.gaps.add(interval, steady)
        stats = outputs.stats
        if stats is not None:
            use = stats.kv_cache_usage
            self.peak_kv = max(self.peak_kv, use)
            self._kv_seconds += use * interval
            self.peak_running = max(self.peak_running, stats.num_running)
            self._count += 1
            if self._count % self._every == 0:
                self.timeline.append((now, stats.num_running, stats.num_waiting, use))
                if len(self.timeline) >= 2 * _TIMELINE:  # keep every other point, and fewer from now on
                    self.timeline, self._every = self.timeline[::2], 2 * self._every
        self._last = now

    def on_end(self, ended: SimulatedRequest) -> None:
        if ended.refusal is not None or ended.first is None:
            self.refused += 1
            self.refusal = self.refusal or ended.refusal
            return
        self.completed += 1
        self.output_tokens += ended.num_outputs
        self.ttft.append(ended.first - ended.due)
        self.e2e.append(ended.last - ended.due)

    @property
    def mean_kv(self) -> float:
        return self._kv_seconds / self._last if self._last else 0.0


def measure(
    setup: SchedulerSetup,
    table: CostTable,
    arrivals: Arrivals,
    *,
    max_concurrency: int | None = None,
    price_per_hour: float | None = None,
    settings: dict[str, float] | None = None,
) -> Capacity:
    """Simulate one load under one setting."""
    meter = _Meter()
    simulation = Simulation(setup, table, arrivals, max_concurrency or math.inf)
    _warm_up(simulation.core.scheduler, table)
    seconds = simulation.run(meter)
    stats = simulation.core.stats()
    tokens = meter.output_tokens
    cost = None if price_per_hour is None or not tokens else price_per_hour * seconds / 3600 / tokens * 1e6
    return Capacity(
        settings=settings or {},
        completed=meter.completed,
        refused=meter.refused,
        refusal=meter.refusal,
        duration_s=seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds if seconds else 0.0,
        requests_per_s=meter.completed / seconds if seconds else 0.0,
        ttft_ms=_percentiles(meter.ttft),
        itl_ms=meter.gaps.percentiles(),
        e2e_ms=_percentiles(meter.e2e),
        preemptions=stats.num_preemptions,
        peak_kv_use=meter.peak_kv,
        mean_kv_use=meter.mean_kv,
        device_busy=simulation.executor.busy / seconds if seconds else 0.0,
        peak_running=meter.peak_running,
        prefix_hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        cost_per_million=cost,
        timeline=meter.timeline,
    )


def _warm_up(scheduler: Scheduler, table: CostTable) -> None:
    """Tell the scheduler how long steps take: one that has served for a while knows it."""
    for _ in range(_LESSONS):
        for rows, tokens in _LEARNT:
            load = StepLoad(rows, rows * table.decode_context, tokens, ends=1 if tokens else 0)
            scheduler.state.shares.measured(StepWork(rows, tokens, pairs_of(0, tokens)), table.seconds(load))


@dataclass(frozen=True)
class Objective:
    """What is best: less or more of a number."""

    name: str
    of: Callable[[Capacity], float]  # smaller is better
    unit: str

    def shown(self, capacity: Capacity) -> str:
        return f"{abs(self.of(capacity)):.4g} {self.unit}"


def _p99(field: str) -> Callable[[Capacity], float]:
    def read(capacity: Capacity) -> float:
        found: dict[str, float] = getattr(capacity, field)
        return found.get("p99", math.inf)

    return read


OBJECTIVES = {
    "throughput": Objective("throughput", lambda c: -c.output_tokens_per_s, "tokens/s"),
    "ttft": Objective("p99 TTFT", _p99("ttft_ms"), "ms"),
    "itl": Objective("p99 ITL", _p99("itl_ms"), "ms"),
    "e2e": Objective("p99 E2E", _p99("e2e_ms"), "ms"),
}


def variants(setup: SchedulerSetup, choices: dict[str, list[float]]) -> list[tuple[dict[str, float], SchedulerSetup]]:
    """Every combination of the settings that are tried; the first is the setup as it is."""
    found: list[tuple[dict[str, float], SchedulerSetup]] = [({}, setup)]
    for values in itertools.product(*choices.values()) if choices else ():
        chosen = dict(zip(choices, values, strict=True))
        found.append((chosen, with_settings(setup, chosen)))
    return found


def with_settings(setup: SchedulerSetup, changes: dict[str, float]) -> SchedulerSetup:
    """The setup with other numbers; ConfigError for one that cannot be."""
    plain: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in TUNABLE:
            raise ConfigError(f"unknown setting {name!r} to try; known: {', '.join(TUNABLE)}")
        if name == "step_time_target":
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value:g} but must be a number of seconds; 0: no target")
        elif not (value >= 1 and float(value).is_integer()):
            raise ConfigError(f"{name} is {value:g} but must be a whole number, at least 1")
        if name == "kv_blocks":
            total = sum(setup.pool_blocks)
            plain["pool_blocks"] = tuple(max(2, int(value) * count // total) for count in setup.pool_blocks)
        else:
            plain[name] = float(value) if name == "step_time_target" else int(value)
    budget = plain.get("max_num_batched_tokens")
    if budget is not None:
        plain.setdefault("long_prefill_token_threshold", max(1, budget // 2))
        plain.setdefault("max_num_seqs", min(setup.max_num_seqs, budget))
    return replace(setup, **plain)


def best_of(results: Sequence[Capacity], objective: Objective) -> str:
    """A sentence about the best of several settings, against the first; who refuses fewer requests is better."""
    first, best = results[0], min(results, key=lambda result: (result.refused, objective.of(result)))
    same = all(result.refused == best.refused for result in results)
    which = f"the best {objective.name} of {'these' if same else 'those that refuse the fewest requests'}"
    if best is first or not best.settings:
        return f"the settings as they are have {which}: {objective.shown(first)}"
    how = ", ".join(f"{name} {value:g}" for name, value in best.settings.items())
    return f"{how} has {which}: {objective.shown(best)} instead of {objective.shown(first)}"


def _percentiles(values: array[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in PERCENTS}
