"""What `quire top` shows, read over HTTP: the console's stream, or metrics where a server has no console."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.types.errors import ConfigError, EngineError

EVENTS = "/console/events"
_TIMEOUT = 10.0  # seconds; the console sends two frames a second
_PREFIX = "quire:"
_QUANTILES = (0.5, 0.9, 0.99)


class Percentiles(msgspec.Struct):
    """Seconds."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Load(msgspec.Struct):
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_rate: float = 0.0  # tokens per second
    generation_rate: float = 0.0
    ttft: Percentiles = msgspec.field(default_factory=Percentiles)
    itl: Percentiles = msgspec.field(default_factory=Percentiles)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: int = 0
    num_restarts: int = 0


class Request(msgspec.Struct):
    id: str
    phase: str
    since: float
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_cached: int = -1
    num_blocks: int = 0
    why: str = ""


class Engine(msgspec.Struct):
    requests: list[Request] = []


class Frame(msgspec.Struct):
    """A moment of a server; fields of the console's frames that are not shown here are left out."""

    at: float
    status: str
    detail: str = ""
    load: Load = msgspec.field(default_factory=Load)
    engine: Engine | None = None
    log: list[tuple[float, str, str]] = []


class Server:
    """A server's address, and the key for it."""

    def __init__(self, address: str, api_key: str | None) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def frames(self, interval: float) -> Iterator[Frame]:
        """Frames without end. EngineError if the server cannot be reached, refuses, or ends."""
        with closing(self._connect()) as connection:
            response = self._get(connection, EVENTS)
            if response.status == 404:
                response.read()
                yield from self._metric_frames(interval)
                return
            self._check(response)
            while line := self._line(response):
                if line.startswith(b'{"at":') or b'"type":"frame"' in line:
                    yield msgspec.json.decode(line, type=Frame)
            raise EngineError(f"{self.address} has ended; `quire ps` lists servers")

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.address} is gone ({error}); `quire ps` lists servers") from error

    def _metric_frames(self, interval: float) -> Iterator[Frame]:
        before: tuple[float, dict[str, float]] | None = None
        while True:
            now, values = time.time(), self._metrics()
            health = msgspec.json.decode(self._text("/health", unhealthy=True))
            yield Frame(now, health["status"], health["detail"], _load(values, now, before))
            before = now, values
            time.sleep(interval)

    def _metrics(self) -> dict[str, float]:
        """Sums over labels, all but a histogram's bounds."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self._text("/metrics").decode()):
            for sample in family.samples:
                bound = f"|{sample.labels['le']}" if "le" in sample.labels else ""
                name = sample.name.removeprefix(_PREFIX) + bound
                values[name] = values.get(name, 0.0) + sample.value
        return values

    def _text(self, path: str, *, unhealthy: bool = False) -> bytes:
        with closing(self._connect()) as connection:
            response = self._get(connection, path)
            if not (unhealthy and response.status == 503):
                self._check(response)
            return response.read()

    def _get(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        try:
            connection.request("GET", path, headers=self._headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"no answer from {self.address} ({error}); `quire ps` lists servers") from error

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status == 401:
            raise ConfigError(f"{self.address} asks for an API key; give it with --api-key or QUIRE_API_KEY")
        if response.status != 200:
            said = response.read(300).decode("utf-8", "replace")
            raise EngineError(f"{self.address} answered with status {response.status}: {said}")

    def _connect(self) -> http.client.HTTPConnection:
        if self.address.startswith("unix:"):
            return _UnixConnection(self.address.removeprefix("unix:"))
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the address is {self.address!r} but must be like http://127.0.0.1:8000")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname, parts.hostname)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, parts.port, timeout=_TIMEOUT, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT)
        self.sock.connect(self._path)


def _load(values: dict[str, float], now: float, before: tuple[float, dict[str, float]] | None) -> Load:
    def rate(name: str) -> float:
        if before is None or now <= before[0]:
            return 0.0
        return max(0.0, values.get(name, 0.0) - before[1].get(name, 0.0)) / (now - before[0])

    def count(name: str) -> int:
        return int(values.get(name, 0.0))

    return Load(
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting"),
        kv_usage=values.get("kv_cache_usage_perc", 0.0),
        prompt_rate=rate("prompt_tokens_computed_total"),
        generation_rate=rate("generation_tokens_total"),
        ttft=percentiles(values, "time_to_first_token_seconds"),
        itl=percentiles(values, "inter_token_latency_seconds"),
        prefix_queries=count("prefix_cache_queries_total"),
        prefix_hits=count("prefix_cache_hits_total"),
        preemptions=count("num_preemptions_total"),
        finished=count("request_success_total"),
        num_restarts=count("engine_restarts_total"),
    )


def percentiles(values: dict[str, float], name: str) -> Percentiles:
    """Upper bounds of the buckets that a histogram's quantiles fall into."""
    start = f"{name}_bucket|"
    buckets: list[tuple[float, float]] = sorted(
        (float(key.removeprefix(start)), value) for key, value in values.items() if key.startswith(start)
    )
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return Percentiles()
    found: list[Any] = [next(bound for bound, below in buckets if below >= q * total) for q in _QUANTILES]
    return Percentiles(*found)
