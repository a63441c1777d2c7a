"""From the records of a run to its figures: percentiles, throughput, goodput, failures by kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from quire.bench.records import RequestRecord, in_flight

PERCENTILES = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of one measure over all requests that have it; milliseconds where it is a time."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every limit; a failed request met none."""

    limits_ms: dict[str, float]
    good: int
    fraction: float
    requests_per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. A distribution is None where no request has the measure."""

    completed: int
    failed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_in_flight: int
    counted_chunks: bool
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    delay_ms: Distribution | None
    goodput: Goodput | None = None

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def percentile(ordered: list[float], percent: float) -> float:
    """Of sorted values, linear between the two nearest."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Iterable[float | None], scale: float = 1.0) -> Distribution | None:
    ordered = sorted(value * scale for value in values if value is not None)
    if not ordered:
        return None
    points = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return Distribution(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        std=statistics.pstdev(ordered),
        min=ordered[0],
        max=ordered[-1],
        **points,
    )


def summarize(records: list[RequestRecord], limits_ms: Mapping[str, float] | None = None) -> Summary:
    """Latencies and tokens are those of completed requests; the duration is that of all."""
    done = [record for record in records if record.error is None]
    begin = min((record.start for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    return Summary(
        completed=len(done),
        failed=len(records) - len(done),
        failures=dict(sorted(Counter(record.error for record in records if record.error is not None).items())),
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in done),
        requests_per_s=per_second(len(done), duration),
        output_tokens_per_s=per_second(output_tokens, duration),
        total_tokens_per_s=per_second(prompt_tokens + output_tokens, duration),
        peak_in_flight=max((count for _, count in in_flight(records)), default=0),
        counted_chunks=any(record.counted_chunks for record in done),
        ttft_ms=distribution((record.ttft for record in done), 1000),
        tpot_ms=distribution((record.tpot for record in done), 1000),
        itl_ms=distribution((gap for record in done for gap in record.gaps), 1000),
        e2e_ms=distribution((record.e2e for record in done), 1000),
        delay_ms=distribution((record.delay for record in records), 1000),
        goodput=goodput(records, limits_ms, duration) if limits_ms else None,
    )


def goodput(records: list[RequestRecord], limits_ms: Mapping[str, float], duration: float) -> Goodput:
    good = sum(meets(record, limits_ms) for record in records)
    return Goodput(
        limits_ms=dict(limits_ms),
        good=good,
        fraction=good / len(records) if records else 0.0,
        requests_per_s=per_second(good, duration),
    )


def meets(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """A measure that the request does not have (TPOT of a one-token answer) breaks no limit."""
    if record.error is not None:
        return False
    measures = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    return all((measures[name] or 0.0) * 1000 <= limit for name, limit in limits_ms.items())


def per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
