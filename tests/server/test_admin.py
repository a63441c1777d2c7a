"""Health, readiness and the like."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

import quire
from quire.config.groups import ServerConfig
from quire.server.admin import harmless_settings
from tests.frontend.fake_client import MAX_MODEL_LEN, FakeClient
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


def test_every_text_of_the_settings_is_kept_back() -> None:
    secrets: dict[str, Any] = {}
    for field in dataclasses.fields(ServerConfig):
        if isinstance(field.default, tuple):
            secrets[field.name] = (f"secret-{field.name}",)
        elif field.default is None or field.type == "str":
            secrets[field.name] = f"secret-{field.name}"
    assert {"api_key", "api_key_file", "ssl_keyfile", "uds", "tool_server"} <= secrets.keys()
    told = harmless_settings(ServerConfig(**secrets))
    assert "secret" not in str(told)
    assert told["max_queue"] == 256
    assert told["log_format"] == "text"


async def test_server_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "key-of-the-environment")
    client = FakeClient()
    client.info = msgspec.structs.replace(client.info, architecture="FakeForCausalLM")
    settings = {"api_keys": ("secret-key",), "ssl_certfile": "/etc/secret-path", "max_queue": 7}
    async with serving(client, **settings) as session:
        assert (await session.get("/server_info")).status_code == 401
        answer = await session.get("/server_info", headers={"authorization": "Bearer secret-key"})
    assert "secret" not in answer.text
    assert "environment" not in answer.text
    info = answer.json()
    assert (info["version"], info["status"]) == (quire.__version__, "ready")
    assert info["engine"]["max_model_len"] == MAX_MODEL_LEN
    assert info["engine"]["architecture"] == "FakeForCausalLM"
    assert info["settings"]["max_queue"] == 7
    provider = FakeProvider(FakeClient(), unavailable="it starts", status="starting")
    async with http(make_app(provider=provider)) as session:
        assert (await session.get("/server_info")).json()["engine"] is None
