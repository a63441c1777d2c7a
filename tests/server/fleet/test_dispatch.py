"""Requests reach the application of the model that they name, over scripted engines in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.metrics.telemetry import make_telemetry
from quire.server.adapters import ServedAdapters
from quire.server.app import build_model_app
from quire.server.control.operator import Wanted
from quire.server.fleet.dispatch import NamesOfOthers
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.launch import build_fleet_app
from quire.server.fleet.member import ServedModel
from quire.server.fleet.residency import Footprint, Residency
from quire.server.supervisor import EngineSupervisor
from quire.types.errors import EngineError
from quire.types.request import AdapterRef, EngineRequest
from tests.frontend.fake_client import EOS, FakeClient
from tests.server.helpers import FakeProvider

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


class FakeSupervisor(FakeProvider):
    """A scripted engine that is there at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wanted = Wanted(EngineConfig())

    async def start(self) -> None:
        return None

    async def wait_serving(self) -> None:
        return None

    async def wait_failed(self) -> EngineError:
        await asyncio.Event().wait()
        raise AssertionError

    async def drain(self) -> bool:
        return True

    async def stop(self) -> None:
        return None


def _answer(name: str) -> Callable[[EngineRequest], list[int]]:
    return lambda request: [*f"I am {name}".encode(), EOS]


class Model(ServedModel):
    async def sleep(self, level: int) -> None:
        return None

    async def wake(self) -> None:
        return None


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Fleet]]:
    """Models `a` (also `alias`, with the adapter `tuned`) and `b`, of which one fits into memory."""
    fleet = Fleet(Residency({"device": 10}, 0.1))
    served: dict[str, ServedModel] = {}
    config = ServerConfig(ui=False, lora_root="/nowhere", **settings)
    for name, names in (("a", ("a", "alias")), ("b", ("b",))):
        engine = FakeClient(_answer(name))
        engine.info = msgspec.structs.replace(engine.info, takes_adapters=True)
        supervisor = FakeSupervisor(engine)
        telemetry = make_telemetry(name, log_interval=0)
        adapters = ServedAdapters([AdapterRef("tuned", "path", "digest")] if name == "a" else [])
        app = build_model_app(
            supervisor,
            supervisor.text,
            config,
            model_names=names,
            observer=telemetry.observer,
            adapters=adapters,
            taken_names=NamesOfOthers(served, name),
        )
        supervised = cast(EngineSupervisor, supervisor)
        model = Model(name, app, supervised, telemetry.observer, telemetry.prometheus)
        served[name] = model
        fleet.residency.add(name, Footprint({"device": 6}, {}, {}))
        fleet.add(name, model)
    app = build_fleet_app(fleet, served, config)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=30) as client:
            yield client, fleet
    finally:
        await fleet.stop()


async def said(client: httpx.AsyncClient, model: str | None) -> str:
    named = {} if model is None else {"model": model}
    answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20, **named})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def test_a_request_reaches_its_model_by_every_name_and_the_first_without_one() -> None:
    async with serving() as (client, fleet):
        for name, expected in ((None, "a"), ("b", "b"), ("alias", "a"), ("a", "a")):
            assert await said(client, name) == f"I am {expected}"
            assert fleet.is_resident(expected)
        body = {**CHAT, "model": "b", "stream": True, "max_tokens": 20}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_an_unknown_name_is_a_404_with_the_known_ones() -> None:
    bodies: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat"), CHAT),
        **{path: {"prompt": "Hi"} for path in ("/v1/completions", "/tokenize", "/api/generate")},
        **{path: {"input": "Hi"} for path in ("/v1/responses", "/v1/embeddings", "/api/embed")},
        "/api/show": {},
    }
    async with serving() as (client, fleet):
        for path, body in bodies.items():
            answer = await client.post(path, json={**body, "model": "c"})
            assert answer.status_code == 404, path
            assert "served here: a, alias, tuned, b" in answer.text
        assert not fleet.is_loaded("a")


async def test_a_body_that_is_wrong_is_refused_as_in_a_server_of_one_model() -> None:
    async with serving(max_body_bytes=1000) as (client, _):
        json = {"content-type": "application/json"}
        assert (await client.post("/v1/completions", content=b"{", headers=json)).status_code == 400
        assert (await client.post("/v1/completions", content=b"[" * 900, headers=json)).status_code == 400
        assert (await client.post("/v1/completions", content=b'{"model": 3, "prompt": "x"}')).status_code == 415
        assert (await client.post("/v1/completions", json={"model": 3, "prompt": "x"})).status_code == 400

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 600

        assert (await client.post("/v1/completions", content=endless(), headers=json)).status_code == 413
        assert (await client.post("/nowhere", json={})).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 405


async def test_what_needs_no_engine_wakes_nobody() -> None:
    async with serving() as (client, fleet):
        assert (await client.post("/tokenize", json={"model": "b", "prompt": "Hi"})).json()["count"] == 2
        assert (await client.post("/api/show", json={"name": "b:latest"})).status_code == 200
        assert (await client.get("/v1/models/b")).json()["id"] == "b"
        assert (await client.get("/tokenizer_info?model=b")).status_code == 200
        assert not fleet.is_loaded("b")
        await said(client, "b")
        await said(client, "a")
        counted = await client.post("/v1/messages/count_tokens", json={**CHAT, "model": "b"})
        assert counted.status_code == 200, counted.text
        assert not fleet.is_resident("b")


async def test_stored_responses_are_found_whichever_model_made_them() -> None:
    async with serving() as (client, _):
        made = await client.post("/v1/responses", json={"model": "b", "input": "Hi", "max_output_tokens": 20})
        assert made.status_code == 200, made.text
        name = made.json()["id"]
        assert (await client.get(f"/v1/responses/{name}")).json()["model"] == "b"
        assert (await client.get(f"/v1/responses/{name}/input_items")).status_code == 200
        assert (await client.delete(f"/v1/responses/{name}")).status_code == 200
        assert (await client.get(f"/v1/responses/{name}")).status_code == 404


async def test_adapters_of_one_model_are_names_that_no_other_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "key")
    async with serving() as (client, _):
        admin = {"authorization": "Bearer key"}
        assert (await said(client, "tuned")) == "I am a"
        for name, model in (("tuned", "b"), ("a", "b"), ("b", "a")):
            wanted = {"model": model, "lora_name": name, "lora_path": "x"}
            answer = await client.post("/v1/load_lora_adapter", json=wanted, headers=admin)
            assert answer.status_code == 400
            assert "another model's name" in answer.text
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"}, headers=admin)
        assert gone.status_code == 200
        assert (await client.get("/v1/models/tuned")).status_code == 404


async def test_metrics_and_load_are_of_all_models() -> None:
    async with serving() as (client, _):
        await said(client, "a")
        await said(client, "b")
        text = (await client.get("/metrics")).text
        assert text.count("# TYPE quire:generation_tokens_total counter") == 1
        for name in ("a", "b"):
            assert f'quire:http_requests_total{{method="POST",model_name="{name}"' in text.replace(
                f'model_name="{name}",method="POST"', f'method="POST",model_name="{name}"'
            )
        assert 'quire:model_resident{model_name="b"} 1.0' in text
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_keys_are_asked_for_before_a_model_is_woken() -> None:
    async with serving(api_key=("secret",)) as (client, fleet):
        assert (await client.post("/v1/completions", json={"model": "b", "prompt": "x"})).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 503  # not started
        assert not fleet.is_loaded("b")
