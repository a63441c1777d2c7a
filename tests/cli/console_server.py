"""A server that has what `quire top` reads, and nothing else: the console's stream, or metrics alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FRAME: dict[str, Any] = {
    "at": 1000.0,
    "status": "ready",
    "detail": "it takes requests",
    "load": {
        "running": 2,
        "waiting": 1,
        "prefilling": 1,
        "prefill_tokens_left": 5118,
        "kv_usage": 0.42,
        "prompt_rate": 2000.0,
        "generation_rate": 123.4,
        "ttft": {"p50": 0.01, "p90": 0.02, "p99": 0.03, "count": 9},
        "itl": {"p50": None, "p90": None, "p99": None, "count": 0},
        "prefix_queries": 100,
        "prefix_hits": 25,
        "preemptions": 3,
        "finished": 7,
        "num_restarts": 0,
    },
    "engine": {
        "at": 1000.0,
        "requests": [
            {
                "id": "chatcmpl-request-1",
                "phase": "prefill",
                "since": 998.5,
                "num_prompt_tokens": 8190,
                "num_tokens": 8190,
                "num_computed": 3072,
                "num_cached": 64,
                "num_blocks": 192,
            },
            {
                "id": "chatcmpl-request-2",
                "phase": "queued",
                "since": 999.0,
                "num_prompt_tokens": 10,
                "num_tokens": 10,
                "num_computed": 0,
                "why": "no free KV blocks",
            },
        ],
        "steps": [],
    },
    "ended": [],
    "log": [[1000.0, "I", "a line of the log"]],
    "restarts": [],
    "type": "frame",
}
METRICS = """\
# TYPE quire:num_requests_running gauge
quire:num_requests_running{model_name="m"} 3.0
# TYPE quire:kv_cache_usage_perc gauge
quire:kv_cache_usage_perc{model_name="m"} 0.5
# TYPE quire:generation_tokens_total counter
quire:generation_tokens_total{model_name="m"} 1000.0
# TYPE quire:time_to_first_token_seconds histogram
quire:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 9.0
quire:time_to_first_token_seconds_bucket{le="0.2",model_name="m"} 10.0
quire:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 10.0
quire:time_to_first_token_seconds_count{model_name="m"} 10.0
quire:time_to_first_token_seconds_sum{model_name="m"} 1.0
"""


class ConsoleServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, has_console: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.has_console = has_console
        self.frame = FRAME
        self.keys: list[str | None] = []
        self.ending = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: ConsoleServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        if self.headers["authorization"] != "Bearer secret":
            self._answer(401, b"{}")
        elif self.path == "/metrics":
            self._answer(200, METRICS.encode())
        elif self.path == "/health":
            self._answer(503, b'{"status": "starting", "detail": "loading weights"}')
        elif not self.server.has_console:
            self._answer(404, b"{}")
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"version": "1", "type": "hello"}).encode() + b"\n")
            while not self.server.ending.wait(0.05):
                try:
                    self.wfile.write(json.dumps(self.server.frame, separators=(",", ":")).encode() + b"\n")
                    self.wfile.flush()
                except OSError:
                    return

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@contextmanager
def console_server(has_console: bool = True) -> Iterator[ConsoleServer]:
    server = ConsoleServer(has_console)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        thread.join(20)
        server.server_close()
