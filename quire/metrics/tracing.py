"""RequestTracer: one OpenTelemetry span per request, made when it ends. OpenTelemetry is imported only when it is on.

Spans hold numbers and settings, never a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.metrics.stats import NULL_OBSERVER, Observer, RequestEnd
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of a call that say which trace it belongs to (W3C Trace Context)."""

_TRACES_PATH = "/v1/traces"
# Seconds to get a batch of spans out, retries included: a collector that is away must not delay the exit for long.
_EXPORT_TIMEOUT = 3.0

AttributeValue = str | int | float | list[str]


def make_tracer(endpoint: str | None, model_name: str) -> Observer:
    """Send spans to an OTLP endpoint over HTTP, such as http://localhost:4318; nowhere when it is None."""
    if endpoint is None:
        return NULL_OBSERVER
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r} but must be an HTTP address, such as http://localhost:4318"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry, which is not installed ({error});"
            ' run pip install "quire[otel]", or leave it out'
        ) from error
    exporter: SpanExporter = OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=_EXPORT_TIMEOUT)
    # The provider is ours alone: an application that set a global one keeps it.
    provider = TracerProvider(resource=Resource.create({"service.name": "quire"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, model_name)


class RequestTracer(Observer):
    """Owns the provider: close() sends what is left and shuts it down."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = StatusCode.ERROR

    def on_request_end(self, event: RequestEnd) -> None:
        # Events are on the monotonic clock, spans on the calendar's.
        offset = time.time() - time.monotonic()

        def at(moment: float) -> int:
            return int((moment + offset) * 1e9)

        span = self._tracer.start_span(
            f"{_operation(event)} {self._model_name}",
            context=self._propagator.extract(event.trace_headers) if event.trace_headers else None,
            kind=self._kind,
            attributes=_attributes(event, self._model_name),
            start_time=at(event.arrival_time),
        )
        if event.queue_time is not None:
            span.add_event("scheduled", timestamp=at(event.arrival_time + event.queue_time))
        if event.first_token_time is not None:
            span.add_event("first token", timestamp=at(event.first_token_time))
        if event.error is not None:
            span.set_status(self._failed, event.error)
        span.end(at(event.finished_time))

    def close(self) -> None:
        self._provider.shutdown()


def _operation(event: RequestEnd) -> str:
    return "embeddings" if event.pools else "text_completion"


def _attributes(event: RequestEnd, model_name: str) -> Mapping[str, AttributeValue]:
    params = event.params
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _operation(event),
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": event.request_id,
        "gen_ai.usage.input_tokens": event.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.num_cached_tokens,
        "gen_ai.latency.time_in_queue": event.queue_time,
        "gen_ai.latency.e2e": event.finished_time - event.arrival_time,
        "error.type": None if event.error is None else "generation_error",
    }
    if not event.pools:
        found |= {
            "gen_ai.response.finish_reasons": [completion.finish_reason for completion in event.completions],
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
            "gen_ai.usage.output_tokens": event.num_generation_tokens,
        }
    if event.first_token_time is not None:
        found["gen_ai.latency.time_to_first_token"] = event.first_token_time - event.arrival_time
    return {name: value for name, value in found.items() if value is not None}


def _traces_url(endpoint: str) -> str:
    """The address as given if it has a path, else with the one that OTLP prescribes."""
    scheme, _, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    return endpoint if slash and path else f"{scheme}://{host}{_TRACES_PATH}"
