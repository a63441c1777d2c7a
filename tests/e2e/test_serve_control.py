"""A server that changes while it runs: adapters come and go, it sleeps, gets other weights, and outlives crashes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quire.cli.main import main
from tests.e2e.serving import Running, eventually, start
from tests.e2e.test_lora import make_adapter
from tests.e2e.tiny import VOCAB, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer
from tests.runner.sampling.test_logits_processors import NAME as PROCESSOR

PROMPT = [5, 9, 33, 7, 21, 4, 60] * 8
KEY = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading").resolve()
    make_model(folder / "base", "llama")
    write_tokenizer(folder / "base", extra_tokens=VOCAB - len(SPECIAL) - 95)
    trained = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        trained.model.norm.weight.mul_(torch.linspace(-1, 1, 64))
    trained.save_pretrained(folder / "trained")
    for seed in (1, 2):
        make_adapter(folder / "base", folder / "adapters" / f"a{seed}", seed)
    other = make_model(folder / "wide", "llama", hidden_size=96, head_dim=24)
    make_adapter(other, folder / "adapters" / "wide", 3)
    hostile = folder / "adapters" / "hostile"
    shutil.copytree(folder / "adapters" / "a1", hostile)
    (hostile / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    (folder / "adapters" / "outside").symlink_to(folder / "base")
    shutil.copytree(folder / "adapters" / "a1", folder / "secret")
    (folder / "adapters" / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "adapters" / "linked" / name).symlink_to(folder / "secret" / name)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    key = root / "key"
    key.write_text("operator\n")
    flags = ["--enable-lora", "--max-loras", "2", "--lora-root", str(root / "adapters"), "--dtype", "float32"]
    admin = ["--admin", f"unix:{root}/admin", "--admin-key-file", str(key)]
    memory = ["--kv-cache-memory", "8MiB", "--logits-processors", PROCESSOR]
    running = start(str(root / "base"), "--served-model-name", "base", "--keep-alive", *flags, *admin, *memory)
    yield running
    assert running.stop() == 0, "".join(running.log)


def body(model: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **fields}


async def tokens(client: httpx.AsyncClient, model: str, **fields: Any) -> list[int]:
    answer = await client.post("/v1/completions", json=body(model, **fields))
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


async def load(client: httpx.AsyncClient, name: str, path: str, **fields: Any) -> httpx.Response:
    asked = {"lora_name": name, "lora_path": path, **fields}
    return await client.post("/v1/load_lora_adapter", json=asked, headers=KEY)


def ctl(root: Path, verb: str, argument: Any = None) -> int:
    where = ["--admin", f"unix:{root}/admin", "--admin-key-file", str(root / "key")]
    return main(["ctl", verb, *([] if argument is None else [json.dumps(argument)]), *where])


async def begin(client: httpx.AsyncClient, model: str, **fields: Any) -> asyncio.Task[list[int]]:
    """A request that the server has when this returns."""

    async def is_open() -> bool:
        return (await client.get("/load")).json()["server_load"] > 0

    task = asyncio.create_task(tokens(client, model, **fields))
    await eventually(is_open)
    return task


async def names(client: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def test_the_operators_logits_processor_edits_requests_that_ask(server: Running) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        free = await tokens(client, "base")
        sevens = await tokens(client, "base", vllm_xargs={"multiples_of": 7})
        wrong = await client.post("/v1/completions", json=body("base", vllm_xargs={"multiples_of": "many"}))
        assert await tokens(client, "base") == free
    assert len(set(sevens)) == 24
    assert {token % 7 for token in sevens} == {0}
    assert "invalid literal for int()" in wrong.text


async def test_what_cannot_be_served_is_refused_and_changes_nothing(server: Running, root: Path) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for path, words in [
            ("none", "no folder"),
            ("wide", "trained on this model"),
            ("hostile", "truncated or not a safetensors"),
            ("outside", "not below --lora-root"),
            ("linked", "not below --lora-root"),
            ("../secret", "not below --lora-root"),
            (str(root / "secret"), "not below --lora-root"),
            ("a\0b", "no path"),
        ]:
            answer = await load(client, "new", path)
            assert answer.status_code == 400, (path, answer.text)
            assert words in answer.json()["error"]["message"], path
        for name, path in [("base", "a1"), ("", "a1"), ("x\n", "a1")]:
            assert (await load(client, name, path)).status_code == 400
        unknown = await client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}, headers=KEY)
        assert unknown.status_code == 404
        assert await names(client) == ["base"]


async def test_other_bytes_under_the_same_name_while_requests_run(server: Running, root: Path) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        plain = await tokens(client, "base")
        assert (await load(client, "it", "a1")).status_code == 200
        first = await tokens(client, "it")
        long = await tokens(client, "it", max_tokens=300)
        assert "loaded already" in (await load(client, "it", "a2")).text
        running = await begin(client, "it", max_tokens=300)
        streams = [asyncio.create_task(tokens(client, "base")) for _ in range(3)]
        assert (await load(client, "it", "a2", load_inplace=True)).status_code == 200
        second = await tokens(client, "it")  # the same prompt: its prefix is cached for other bytes alone
        assert await running == long
        assert [await stream for stream in streams] == [plain] * 3
        assert len({tuple(each) for each in (plain, first, second)}) == 3
        assert (await load(client, "it", str(root / "adapters" / "a1"), load_inplace=True)).status_code == 200
        assert await tokens(client, "it") == first
        assert await asyncio.to_thread(ctl, root, "load-adapter", {"lora_name": "two", "lora_path": "a2"}) == 0
        assert await tokens(client, "two") == second
        assert await asyncio.to_thread(ctl, root, "load-adapter", {"lora_name": "two", "lora_path": "a2"}) == 1

        before = server.last_engine_pid()
        streams = [asyncio.create_task(tokens(client, name)) for name in ("two", "it", "base")]
        assert await asyncio.to_thread(ctl, root, "restart-engine") == 0
        assert [await stream for stream in streams] == [second, first, plain]
        assert [await tokens(client, name) for name in ("it", "two")] == [first, second]
        assert server.last_engine_pid() != before

        assert await names(client) == ["base", "it", "two"]
        going = await begin(client, "it", max_tokens=300)
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}, headers=KEY)
        assert answer.status_code == 200
        assert await asyncio.to_thread(ctl, root, "unload-adapter", {"lora_name": "it"}) == 0
        assert (await client.post("/v1/completions", json=body("two"))).status_code == 404
        assert await going == long
        assert await names(client) == ["base"]


async def health(client: httpx.AsyncClient) -> tuple[str, int, int]:
    """The word, and the statuses of /health and /ready."""
    alive, ready = await client.get("/health"), await client.get("/ready")
    return alive.json()["status"], alive.status_code, ready.status_code


async def test_sleep_by_ctl(server: Running, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        expected = await tokens(client, "base", max_tokens=300)
        running = await begin(client, "base", max_tokens=300)
        assert await asyncio.to_thread(ctl, root, "sleep") == 0
        assert '"asleep": 1' in capsys.readouterr().out
        assert await health(client) == ("asleep", 200, 503)
        waiting = asyncio.create_task(tokens(client, "base", max_tokens=300))
        assert await asyncio.to_thread(ctl, root, "restart-engine") == 0
        assert await health(client) == ("asleep", 200, 503), "it survives a restart"
        assert not running.done()
        assert await asyncio.to_thread(ctl, root, "wake") == 0
        assert (await running, await waiting) == (expected, expected)
        assert await asyncio.to_thread(ctl, root, "sleep", {"level": 2, "requests": "refuse"}) == 0
        refused = await client.post("/v1/completions", json=body("base"))
        assert (refused.status_code, "asleep" in refused.text, "retry-after" in refused.headers) == (503, True, True)
        assert await asyncio.to_thread(ctl, root, "wake") == 0
        assert await health(client) == ("ready", 200, 200)
        assert await tokens(client, "base", max_tokens=300) == expected
        assert await asyncio.to_thread(ctl, root, "sleep", {"level": 7}) == 1
        assert "must be 1" in capsys.readouterr().err


async def test_sleep_by_an_ollama_client(server: Running) -> None:
    """keep_alive puts the idle engine to sleep, and the next request of any API wakes it."""

    async def is_asleep() -> bool:
        return await health(client) == ("asleep", 200, 503)

    async def is_ready() -> bool:
        found = await health(client)
        assert found[0] != "asleep", "it has answered"
        return found == ("ready", 200, 200)

    asked = {"model": "base", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        expected = await tokens(client, "base")
        assert (await client.post("/api/generate", json={**asked, "keep_alive": "50ms"})).status_code == 200
        await eventually(is_asleep)
        assert (await client.get("/api/ps")).json() == {"models": []}
        assert await tokens(client, "base") == expected, "awake, with the same weights"
        await eventually(is_asleep)
        assert (await client.post("/api/generate", json={"model": "base", "keep_alive": -1})).status_code == 200
        assert await tokens(client, "base") == expected
        assert [model["name"] for model in (await client.get("/api/ps")).json()["models"]] == ["base:latest"]
        await eventually(is_ready)  # it is looked every 20 ms whether the engine has woken


async def test_pause_and_limits_by_ctl(server: Running, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        expected = await tokens(client, "base")
        assert await asyncio.to_thread(ctl, root, "pause") == 0
        waiting = await begin(client, "base")
        assert await health(client) == ("paused", 200, 503)
        assert await asyncio.to_thread(ctl, root, "set-limits", {"max_num_seqs": 3}) == 0
        assert await asyncio.to_thread(ctl, root, "restart-engine") == 0
        capsys.readouterr()
        assert await asyncio.to_thread(ctl, root, "state") == 0
        state = json.loads(capsys.readouterr().out)
        assert (state["is_paused"], state["max_num_seqs"]) == (True, 3)
        assert not waiting.done()
        assert await asyncio.to_thread(ctl, root, "resume") == 0
        assert await waiting == expected
        assert await asyncio.to_thread(ctl, root, "reset-prefix-cache") == 0
        assert await asyncio.to_thread(ctl, root, "set-log-level", {"level": "debug"}) == 0
        assert await asyncio.to_thread(ctl, root, "set-log-level", {"level": "info"}) == 0
        assert await asyncio.to_thread(ctl, root, "set-limits", {"max_num_seqs": 10**6}) == 1


async def test_other_weights_outlive_a_crash(server: Running, root: Path) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        old = await tokens(client, "base")
        running = await begin(client, "base", max_tokens=300)
        assert await asyncio.to_thread(ctl, root, "update-weights", {"path": str(root / "wide")}) == 1
        assert await tokens(client, "base") == old, "nothing has changed"
        wanted = {"path": str(root / "trained"), "requests": "drain"}
        assert await asyncio.to_thread(ctl, root, "update-weights", wanted) == 0
        assert (await running)[: len(old)] == old
        new = await tokens(client, "base")
        assert new != old
        seen = len(server.log)
        os.kill(server.last_engine_pid(), signal.SIGKILL)
        assert await tokens(client, "base") == new
        server.engine_pid(seen)
        assert await asyncio.to_thread(ctl, root, "update-weights", {"path": str(root / "base")}) == 0
        assert await tokens(client, "base") == old


def pushed(folder: Path) -> list[dict[str, Any]]:
    """As a trainer sends it."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    return [
        {
            "name": name,
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data": base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode(),
        }
        for name, tensor in load_file(folder / "model.safetensors").items()
    ]


async def test_weights_are_pushed_tensor_by_tensor_and_outlive_a_crash(server: Running, root: Path) -> None:
    transport = httpx.AsyncHTTPTransport(uds=f"{root}/admin")
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        httpx.AsyncClient(base_url="http://admin", transport=transport, timeout=60, headers=KEY) as admin,
    ):
        old = await tokens(client, "base")
        tensors = pushed(root / "trained")
        refused = await admin.post("/admin/push-weights", json={"tensors": tensors}, headers={"authorization": "x"})
        assert refused.status_code == 401
        assert (await admin.post("/admin/apply-pushed-weights")).status_code == 400, "there are none"
        for wrong, words in [
            ({"name": "", "dtype": "F32", "shape": [1], "data": "AAAAAA=="}, "no name"),
            ({"name": "x", "dtype": "F99", "shape": [1], "data": "AAAAAA=="}, "dtype"),
            ({"name": "x", "dtype": "F32", "shape": [2], "data": "AAAAAA=="}, "takes 8"),
            ({"name": "x", "dtype": "F32", "shape": [-1, -1], "data": "AAAAAA=="}, "takes"),
        ]:
            answer = await admin.post("/admin/push-weights", json={"tensors": [wrong]})
            assert (answer.status_code, words in answer.text) == (400, True), answer.text
        half = await admin.post("/admin/push-weights", json={"tensors": tensors[:3]})
        assert half.json()["num_tensors"] == 3
        twice = await admin.post("/admin/push-weights", json={"tensors": tensors[:1]})
        assert (twice.status_code, "twice" in twice.text) == (400, True)
        lacking = await admin.post("/admin/apply-pushed-weights", json={"requests": "continue"})
        assert lacking.status_code == 409
        assert await tokens(client, "base") == old, "nothing has changed"
        for tensor in tensors:
            answer = await admin.post("/admin/push-weights", json={"tensors": [tensor]})
            assert answer.status_code == 200, answer.text
        assert (await admin.post("/admin/apply-pushed-weights", json={"requests": "drain"})).status_code == 200
        new = await tokens(client, "base")
        assert new != old
        seen = len(server.log)
        os.kill(server.last_engine_pid(), signal.SIGKILL)
        assert await tokens(client, "base") == new
        server.engine_pid(seen)
        assert await asyncio.to_thread(ctl, root, "update-weights", {"path": str(root / "base")}) == 0
        assert await tokens(client, "base") == old
