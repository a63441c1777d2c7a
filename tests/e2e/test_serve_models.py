"""Several models in one server: two that generate and an embedder take turns in memory that holds two of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cli.main import main
from tests.e2e.serving import Running, eventually, start
from tests.e2e.tiny import VOCAB, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer

MODELS = ("first", "second", "embedder")
# A process counts 300 MiB, asleep or awake, and each model 262 MiB more while it is awake: two of three fit. The one
# that cannot be loaded takes nothing in the end.
FILE = """
memory_budget = "1500MiB"
min_residence = 0.1

[models.first]
model = "ROOT/first"
served_model_name = ["gpt-4"]
max_num_seqs = 8

[models.second]
model = "ROOT/second"

[models.embedder]
model = "ROOT/embedder"
runner = "pooling"

[models.broken]
model = "ROOT/broken"
kv_cache_memory = "1MiB"
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models").resolve()
    for number, name in enumerate((*MODELS, "broken")):
        make_model(folder / name, "llama", num_hidden_layers=2 + number)
        write_tokenizer(folder / name, extra_tokens=VOCAB - len(SPECIAL) - 95)
    (folder / "broken" / "model.safetensors").write_bytes(b"not weights")
    (folder / "models.toml").write_text(FILE.replace("ROOT", str(folder)))
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    flags = ["--models", str(root / "models.toml"), "--dtype", "float32", "--kv-cache-memory", "256MiB"]
    running = start(*flags, "--admin", f"unix:{root}/admin", "--num-threads", "1")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0, "".join(running.log)


def body(model: str, seed: int = 0, count: int = 8) -> dict[str, Any]:
    prompt = [5, 9, 33, 7, 21 + seed % 40]
    fields = {"max_tokens": count, "temperature": 1, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, **fields}


async def ask(client: httpx.AsyncClient, model: str, seed: int = 0, count: int = 8) -> list[float]:
    """Tokens of a completion, or a vector of the embedder."""
    if model == "embedder":
        answer = await client.post("/v1/embeddings", json={"model": model, "input": [5, 9, 33, 7, 21 + seed % 40]})
        assert answer.status_code == 200, answer.text
        vector: list[float] = answer.json()["data"][0]["embedding"]
        return vector
    answer = await client.post("/v1/completions", json=body(model, seed, count))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    tokens: list[float] = answer.json()["choices"][0]["token_ids"]
    assert len(tokens) == count
    return tokens


async def values(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    """A metric's values by its label."""
    text = (await client.get("/metrics")).text
    (family,) = [family for family in text_string_to_metric_families(text) if family.name == name]
    return {next(iter(sample.labels.values())): sample.value for sample in family.samples}


async def test_models_take_turns_under_a_random_load_and_no_request_is_lost(server: Running) -> None:
    rng = random.Random(7)
    load = [(rng.choice(("gpt-4", "second", "embedder")), seed % 5, rng.choice((4, 24))) for seed in range(30)]
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        alone = {each: await ask(client, *each) for each in sorted(set(load))}  # one model after the other
        together = await asyncio.gather(*(ask(client, *each) for each in load))
        assert [alone[each] for each in load] == together
        resident = await values(client, "quire:model_resident")
        assert resident.keys() == {*MODELS, "broken"}
        assert 1 <= sum(resident.values()) <= 2
        assert (await values(client, "quire:models_memory_bytes"))["host"] <= 1500 << 20
        generated = await values(client, "quire:generation_tokens")
        assert generated["first"] > 0
        assert generated["second"] > 0
    assert any("is asleep after" in line for line in server.log)


async def test_every_api_lists_all_models_and_routes_by_name(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["first", "gpt-4", "second", "embedder", "broken"]
        tags = [model["name"] for model in (await client.get("/api/tags")).json()["models"]]
        assert tags == [f"{name}:latest" for name in listed]
        page = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [model["id"] for model in page.json()["data"]] == listed
        assert (await client.get("/v1/models/second")).json()["id"] == "second"

        prompt = {"prompt": "Hi", "stream": False, "options": {"num_predict": 3}}
        answer = await client.post("/api/generate", json={"model": "second:latest", **prompt})
        assert answer.json()["done"], answer.text
        vectors = await client.post("/api/embed", json={"model": "embedder", "input": "Hi"})
        assert len(vectors.json()["embeddings"]) == 1, vectors.text
        loaded = [model["name"] for model in (await client.get("/api/ps")).json()["models"]]
        assert "embedder:latest" in loaded
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize", "/v1/embeddings"):
            answer = await client.post(path, json={"model": "third", "input": "Hi", **chat})
            assert answer.status_code == 404, (path, answer.text)
            assert "first, gpt-4, second, embedder, broken" in answer.text
        wrong = await client.post("/v1/completions", json={"model": "embedder", "prompt": "Hi"})
        assert wrong.status_code == 400


async def test_a_model_that_cannot_be_loaded_says_why_and_others_serve(server: Running) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        answer = await client.post("/v1/completions", json=body("broken"))
        assert answer.status_code == 503, answer.text
        assert "'broken' is not served" in answer.json()["error"]["message"]
        assert "safetensors" in answer.json()["error"]["message"]
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json()["models"]["broken"]["status"] == "failed"
        await ask(client, "first")


async def test_a_killed_engine_disturbs_nobody_else(
    server: Running, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        before = {model: await ask(client, model, 3, 24) for model in ("first", "second")}

        def ctl(*words: str) -> Any:
            assert main(["ctl", *words, "--admin", f"unix:{root}/admin"]) == 0
            return json.loads(capsys.readouterr().out)

        statuses = await asyncio.to_thread(ctl, "status")
        assert set(statuses) == {*MODELS, "broken"}
        os.kill(statuses["second"]["pid"], signal.SIGKILL)
        again = await asyncio.gather(*(ask(client, model, 3, 24) for model in ("second", "first")))
        assert list(again) == [before["second"], before["first"]]

        await asyncio.to_thread(ctl, "sleep", "--model", "first")
        assert (await asyncio.to_thread(ctl, "status", "--model", "first"))["status"] == "asleep"
        waiting = asyncio.create_task(ask(client, "first", 3, 24))
        await ask(client, "second", 1)
        assert not waiting.done()
        await asyncio.to_thread(ctl, "wake", "--model", "first")
        assert await waiting == before["first"]

        async def is_ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        await eventually(is_ready)


def test_verbs_that_change_need_a_model(server: Running, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ctl", "sleep", "--admin", f"unix:{root}/admin"]) == 1
    assert "say which with --model: first, second, embedder, broken" in capsys.readouterr().err
    assert main(["ctl", "sleep", "--model", "other", "--admin", f"unix:{root}/admin"]) == 1
