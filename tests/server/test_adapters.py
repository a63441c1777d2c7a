"""LoRA adapters on the server: named as models, listed with their parent, and what is wrong with --lora-modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.server.adapters import ServedAdapters, read_lora_modules
from quire.types.errors import AdapterError, ConfigError
from quire.types.request import AdapterRef, EngineRequest
from tests.frontend.fake_client import ClassifyingClient, FakeClient, PoolingClient
from tests.server.helpers import MODEL, serving
from tests.server.pooling_bodies import POOLING_BODIES

SQL = AdapterRef("sql", "1234", "/adapters/sql")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def adapting_client(seen: list[AdapterRef | None]) -> FakeClient:
    def answer(request: EngineRequest) -> list[int]:
        seen.append(request.adapter)
        return [65, 66]

    client = FakeClient(answer)
    client.info = msgspec.structs.replace(client.info, takes_adapters=True)
    return client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/messages", CHAT),
    ],
)
async def test_the_model_of_a_request_may_be_an_adapter(path: str, body: dict[str, Any]) -> None:
    seen: list[AdapterRef | None] = []
    async with serving(adapting_client(seen), adapters=ServedAdapters([SQL])) as session:
        for name in ("sql", MODEL):
            answer = await session.post(path, json={**body, "model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
        missing = await session.post(path, json={**body, "model": "sqlite"})
    assert seen == [SQL, None]
    assert missing.status_code == 404
    assert "sql" in missing.text


@pytest.mark.parametrize("name", ["sql", "sql:latest"])
async def test_ollamas_clients_find_adapters_too(name: str) -> None:
    seen: list[AdapterRef | None] = []
    async with serving(adapting_client(seen), adapters=ServedAdapters([SQL])) as session:
        for path in ("/api/tags", "/api/ps"):
            listed = (await session.get(path)).json()["models"]
            assert [one["name"] for one in listed] == [f"{MODEL}:latest", "alias/name:latest", "sql:latest"]
            assert listed[-1]["digest"] == SQL.digest
        shown = (await session.post("/api/show", json={"model": name})).json()
        prompts: list[tuple[str, dict[str, Any]]] = [
            ("/api/chat", {"messages": CHAT["messages"]}),
            ("/api/generate", {"prompt": "hi"}),
            ("/api/generate", {"prompt": "hi", "raw": True}),
        ]
        for path, body in prompts:
            answer = await session.post(path, json={**body, "model": name, "stream": False})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
    assert "ADAPTER sql" in shown["modelfile"]
    assert seen == [SQL, SQL, SQL]


@pytest.mark.parametrize(
    ("path", "body"),
    [*POOLING_BODIES.items(), ("/api/embed", {"input": "Hi"}), ("/api/embeddings", {"prompt": "Hi"})],
)
async def test_what_pools_takes_adapters_too(path: str, body: dict[str, Any]) -> None:
    client = ClassifyingClient("no", "yes") if path == "/classify" else PoolingClient()
    client.info = msgspec.structs.replace(client.info, takes_adapters=True)
    async with serving(client, adapters=ServedAdapters([SQL])) as session:
        for name in ("sql", MODEL):
            answer = await session.post(path, json={**body, "model": name})
            assert answer.status_code == 200, answer.text
    half = len(client.added) // 2
    assert [request.adapter for request in client.added] == [SQL] * half + [None] * half


async def test_adapters_are_listed_with_their_parent() -> None:
    async with serving(adapting_client([]), adapters=ServedAdapters([SQL])) as session:
        cards = (await session.get("/v1/models")).json()["data"]
        card = (await session.get("/v1/models/sql")).json()
        anthropic = (await session.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert [(each["id"], each["parent"]) for each in cards] == [(MODEL, None), ("alias/name", None), ("sql", MODEL)]
    assert card == cards[-1]
    assert [each["id"] for each in anthropic["data"]] == [MODEL, "alias/name", "sql"]


def save_adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.safetensors").write_bytes(b"bytes")
    return folder


def test_what_lora_modules_may_be(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "sql")
    for text in (f"sql={folder}", json.dumps({"name": "sql", "path": str(folder)})):
        ref = read_lora_modules([text], [MODEL]).get("sql")
        assert ref is not None
        assert (ref.name, ref.path) == ("sql", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    other = read_lora_modules([f"sql={folder}"], [MODEL]).get("sql")
    assert other is not None
    assert other.digest != ref.digest, "other bytes are another adapter"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"bias": "all"}, "biases"),
        ({"r": "many"}, "Expected `int`"),
    ],
)
def test_adapters_that_cannot_be_served(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = save_adapter(tmp_path / "it", **config)
    with pytest.raises(AdapterError, match=words):
        read_lora_modules([f"it={folder}"], [MODEL])


@pytest.mark.parametrize("text", ["sql", "=x", "sql=", '{"name": "sql"}', f"{MODEL}=x"])
def test_lora_modules_that_say_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        read_lora_modules([text], [MODEL])


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is no folder"):
        read_lora_modules([f"sql={tmp_path / 'none'}"], [MODEL])
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_lora_modules([f"sql={tmp_path}"], [MODEL])
