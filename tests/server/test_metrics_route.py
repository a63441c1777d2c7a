"""GET /metrics over a whole app: it counts what clients counted, and nothing that a stranger makes up."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

from quire.config.groups import ServerConfig
from quire.frontend.async_engine import AsyncEngine
from quire.metrics.telemetry import Telemetry, make_telemetry
from quire.server.app import build_app
from quire.server.metrics_route import make_metrics_router
from tests.frontend.fake_client import FakeClient, PoolingClient
from tests.metrics.scrape import Scrape
from tests.server.helpers import FakeProvider, http


class ObservedProvider(FakeProvider):
    telemetry: Telemetry

    def __post_init__(self) -> None:
        self.telemetry = make_telemetry("m")
        self._engine = AsyncEngine(self.client, self.text, observer=self.telemetry.observer)


def make(client: FakeClient, **options: Any) -> tuple[FastAPI, ObservedProvider]:
    provider = ObservedProvider(client)
    app = build_app(
        provider,
        provider.text,
        ServerConfig(),
        model_names=("m",),
        observer=provider.telemetry.observer,
        extra_routers=[make_metrics_router(provider.telemetry.prometheus)],
        **options,
    )
    return app, provider


async def scraped(client: httpx.AsyncClient) -> Scrape:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return Scrape(answer.text)


async def test_usage_told_to_clients_is_what_is_counted() -> None:
    app, provider = make(FakeClient())

    async def ask(client: httpx.AsyncClient, number: int) -> dict[str, int]:
        body = {"model": "m", "prompt": "x" * (number + 1), "n": 1 + number % 3, "max_tokens": 1 + number % 7}
        answer = await client.post("/v1/completions", json=body)
        usage: dict[str, int] = answer.json()["usage"]
        return usage

    async with http(app) as client:
        usages = await asyncio.gather(*(ask(client, number) for number in range(20)))
        refused = await client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": "many"})
        found = await scraped(client)
    assert refused.status_code == 400
    assert found.get("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert found.get("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert found.get("e2e_request_latency_seconds_count") == 20
    route = {"method": "POST", "route": "/v1/completions"}
    assert found.get("http_requests_total", **route, status="200") == 20
    assert found.get("http_requests_total", **route, status="400") == 1
    provider.telemetry.observer.close()


async def test_pooled_prompts_are_counted() -> None:
    app, provider = make(PoolingClient())
    async with http(app) as client:
        answers = [
            await client.post("/v1/embeddings", json={"input": ["Hello", "you"]}),
            await client.post("/score", json={"text_1": "abc", "text_2": ["de", "f"]}),
            await client.post("/v1/embeddings", json={"input": []}),
        ]
        found = await scraped(client)
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert found.get("prompt_tokens_total") == 8 + 6
    assert found.get("generation_tokens_total") == 0
    assert found.get("e2e_request_latency_seconds_count") == 5
    for route, status in (("/v1/embeddings", "200"), ("/v1/embeddings", "400"), ("/score", "200")):
        assert found.get("http_requests_total", method="POST", route=route, status=status) == 1
    provider.telemetry.observer.close()


async def test_labels_are_routes_and_known_methods_only() -> None:
    app, provider = make(FakeClient(), api_keys=("secret",))
    async with http(app) as client:
        await client.get("/made/up/1")
        await client.request("BREW", "/made/up/2")
        await client.post("/v1/completions", json={})  # no key
        await client.get("/v1/models/x", headers={"authorization": "Bearer secret"})
        found = await scraped(client)
    calls = {
        tuple(dict(labels)[name] for name in ("method", "route", "status")): value
        for (name, labels), value in found.samples.items()
        if name == "http_requests_total"
    }
    assert calls == {
        ("GET", "none", "401"): 1,
        ("other", "none", "401"): 1,
        ("POST", "none", "401"): 1,
        ("GET", "/v1/models/{model_id}", "404"): 1,
    }
    provider.telemetry.observer.close()


async def test_openmetrics_on_request() -> None:
    app, _ = make(FakeClient())
    async with http(app) as client:
        answer = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


async def test_two_servers_in_one_process_do_not_clash() -> None:
    (first, one), (second, two) = make(FakeClient()), make(FakeClient())
    async with http(first) as client:
        await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert (await scraped(client)).get("prompt_tokens_total") == 1
    async with http(second) as client:
        assert (await scraped(client)).get("prompt_tokens_total") == 0
    one.telemetry.observer.close()
    two.telemetry.observer.close()
