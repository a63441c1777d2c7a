"""Health, readiness and the like."""

from __future__ import annotations

import pytest

import quire
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import FakeProvider, http, make_app, serving


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        ("ready", 200, 200),
        ("draining", 200, 503),
        ("starting", 503, 503),
        ("restarting", 503, 503),
        ("stalled", 503, 503),
        ("failed", 503, 503),
    ],
)
async def test_health_and_readiness(status: str, health: int, ready: int) -> None:
    provider = FakeProvider(FakeClient(), status=status)
    async with http(make_app(provider=provider)) as session:
        answers = [await session.get(path) for path in ("/health", "/ping", "/ready")]
    assert [answer.status_code for answer in answers] == [health, health, ready]
    assert answers[0].json() == {"status": status, "detail": "it takes requests"}


async def test_version_and_head() -> None:
    async with serving() as session:
        assert (await session.get("/version")).json() == {"version": quire.__version__}
        head = await session.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_an_engine_that_is_away_is_a_503_with_a_time() -> None:
    provider = FakeProvider(FakeClient(), unavailable="the engine is restarting")
    async with http(make_app(provider=provider)) as session:
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
            response = await session.post("/v1/completions", json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "3"
            assert response.json()["error"]["code"] == "engine_unavailable"
        models = await session.get("/v1/models")
        tokens = await session.post("/tokenize", json={"prompt": "x"})
    assert models.json()["data"][0]["max_model_len"] is None
    assert tokens.json()["tokens"] == [120]
