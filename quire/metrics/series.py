"""The numbers behind the metrics: plain adding on the hot path, made into prometheus_client's families at a scrape.

prometheus_client's own counters take a lock and walk the buckets for every value; a step's values come here in bulk
and from one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Exposed
from prometheus_client.utils import floatToGoString

from quire.metrics.catalog import PREFIX, VLLM_LABELS, VLLM_PREFIX, Metric, vllm_metrics


class Number:
    """The value of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Histogram:
    """How many values fell under which bound. A value equal to a bound is under it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


S = TypeVar("S", bound=Number | Histogram)


class Series(Generic[S]):
    """One metric's values, by the values of its own labels."""

    def __init__(self, metric: Metric, make: Callable[[], S]) -> None:
        self.metric = metric
        self._make = make
        self._by_labels: dict[tuple[str, ...], S] = {}

    def at(self, *labels: str) -> S:
        """The value for these labels, zero if it is new."""
        found = self._by_labels.get(labels)
        if found is None:
            found = self._by_labels[labels] = self._make()
        return found

    def clear(self) -> None:
        self._by_labels.clear()

    def expose(self, model_name: str) -> Exposed:
        return self._family(self.metric, PREFIX, {"model_name": model_name})

    def expose_for_vllm(self, model_name: str) -> list[Exposed]:
        """Under vLLM's names for it, of which there may be none."""
        common = {"model_name": model_name, **VLLM_LABELS}
        return [self._family(metric, VLLM_PREFIX, common) for metric in vllm_metrics(self.metric)]

    def _family(self, metric: Metric, prefix: str, common: Mapping[str, str]) -> Exposed:
        name, labels = prefix + metric.name, (*common, *metric.labels)
        family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        if metric.kind == "histogram":
            family = HistogramMetricFamily(name, metric.help, labels=labels)
        elif metric.kind == "counter":
            family = CounterMetricFamily(name, metric.help, labels=labels)
        else:
            family = GaugeMetricFamily(name, metric.help, labels=labels)
        for values, series in self._by_labels.items():
            if isinstance(series, Histogram):
                assert isinstance(family, HistogramMetricFamily)
                family.add_metric((*common.values(), *values), series.buckets(), series.sum)
            else:
                assert not isinstance(family, HistogramMetricFamily)
                family.add_metric((*common.values(), *values), series.value)
        return family
