from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.frontend.async_engine import AsyncEngine
from quire.metrics.stats import NULL_OBSERVER, CompletionEnd, RequestEnd
from quire.metrics.tracing import RequestTracer, make_tracer
from quire.types.errors import ConfigError, GenerationError
from quire.types.sampling import PoolingParams, SamplingParams
from tests.frontend.fake_client import FakeClient, PoolingClient, text_model

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=x"}


def make() -> tuple[RequestTracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return RequestTracer(provider, "smollm2"), exporter


def one(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_a_request_through_the_engine_is_a_span_under_its_callers() -> None:
    tracer, exporter = make()
    engine = AsyncEngine(FakeClient(), text_model(), observer=tracer)
    params = SamplingParams(n=2, temperature=0.5, max_tokens=30, seed=7)
    before = time.time_ns()
    async for _ in engine.generate("Hello", params, "r", trace_headers=HEADERS):
        pass
    span = one(exporter)
    assert span.name == "text_completion smollm2"
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state.get("vendor") == "x"
    assert span.start_time is not None
    assert span.end_time is not None
    assert before - 1_000_000 <= span.start_time <= span.end_time <= time.time_ns() + 1_000_000
    attributes = dict(span.attributes or {})
    assert 0 <= attributes.pop("gen_ai.latency.time_to_first_token") <= attributes.pop("gen_ai.latency.e2e")  # type: ignore[operator]
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "smollm2",
        "gen_ai.response.model": "smollm2",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 12,
    }
    assert "Hello" not in span.to_json()


async def test_a_pooled_prompt_is_a_span_under_its_callers() -> None:
    tracer, exporter = make()
    engine = AsyncEngine(PoolingClient(), text_model(), observer=tracer)
    await engine.embed("Hello", PoolingParams(), "r", trace_headers=HEADERS)
    span = one(exporter)
    assert span.name == "embeddings smollm2"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert "gen_ai.request.temperature" not in attributes
    assert "Hello" not in span.to_json()


async def test_a_failed_request_is_a_failed_span() -> None:
    tracer, exporter = make()
    engine = AsyncEngine(FakeClient(errors={"r": "boom"}), text_model(), observer=tracer)
    with pytest.raises(GenerationError):
        async for _ in engine.generate("Hello", request_id="r"):
            pass
    span = one(exporter)
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "boom"
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert span.attributes["error.type"] == "generation_error"


def ended(trace: dict[str, str] | None = None) -> RequestEnd:
    now = time.monotonic()
    completions = (CompletionEnd("length", 4),)
    return RequestEnd("r", SamplingParams(), 5, completions, now - 3, now, now - 1, 0.5, 2, None, trace)


def test_the_way_of_a_request_is_told_by_events() -> None:
    tracer, exporter = make()
    tracer.on_request_end(ended())
    span = one(exporter)
    assert span.start_time is not None
    assert [(e.name, round((e.timestamp - span.start_time) / 1e9, 3)) for e in span.events] == [
        ("scheduled", 0.5),
        ("first token", 2.0),
    ]
    assert span.attributes is not None
    assert span.attributes["gen_ai.latency.time_in_queue"] == 0.5


@pytest.mark.parametrize("header", ["", "garbage", "00-0-0-00"])
def test_a_broken_trace_context_begins_a_new_trace(header: str) -> None:
    tracer, exporter = make()
    tracer.on_request_end(ended({"traceparent": header}))
    assert one(exporter).parent is None


def test_an_unsampled_parent_gives_no_span() -> None:
    tracer, exporter = make()
    tracer.on_request_end(ended({"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}))
    assert exporter.get_finished_spans() == ()


def test_off_unless_an_endpoint_is_given() -> None:
    assert make_tracer(None, "m") is NULL_OBSERVER


def test_off_imports_no_opentelemetry() -> None:
    code = "import sys, quire.metrics.telemetry as t; t.make_telemetry('m'); print('opentelemetry' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="'localhost:4318' but must be an HTTP address"):
        make_tracer("localhost:4318", "m")


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"quire\[otel\]"):
        make_tracer("http://localhost:4318", "m")


@pytest.mark.parametrize(("suffix", "path"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/own/path", "/own/path")])
def test_spans_arrive_at_a_collector(suffix: str, path: str) -> None:
    posts: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Not in the output of tests."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        tracer = make_tracer(f"http://127.0.0.1:{server.server_port}{suffix}", "the-model")
        tracer.on_request_end(ended())
        tracer.close()
        server.shutdown()
        thread.join()
    assert [where for where, _ in posts] == [path]
    assert b"text_completion the-model" in posts[0][1]
