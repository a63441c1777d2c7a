"""Telemetry: the listeners of one server, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.metrics.logging import INTERVAL, StatsLog
from quire.metrics.prometheus import PrometheusObserver
from quire.metrics.stats import NULL_OBSERVER, Observer, Observers
from quire.metrics.tracing import make_tracer


@dataclass(frozen=True, slots=True)
class Telemetry:
    """`observer` hears everything and goes to the engine and the HTTP side; whoever made it closes it."""

    observer: Observer
    prometheus: PrometheusObserver


def make_telemetry(
    model_name: str,
    *,
    otlp_traces_endpoint: str | None = None,
    log_interval: float = INTERVAL,
    vllm_names: bool = False,
    others: Sequence[Observer] = (),
    is_one_of_several: bool = False,
) -> Telemetry:
    """`log_interval` is in seconds; 0 writes no line. With `vllm_names` metrics have vLLM's names too.

    `others` listen, too. The log names a model that `is_one_of_several`.

    ConfigError if spans are asked for and cannot be sent.
    """
    prometheus = PrometheusObserver(model_name, vllm_names=vllm_names)
    name = model_name if is_one_of_several else ""
    log = StatsLog(log_interval, name=name) if log_interval > 0 else NULL_OBSERVER
    tracer = make_tracer(otlp_traces_endpoint, model_name)
    listening = [observer for observer in (prometheus, log, tracer, *others) if observer is not NULL_OBSERVER]
    return Telemetry(Observers(*listening), prometheus)
