"""`quire serve -dp` with ranks that join from other hosts; replicas that go and come back while requests run."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from quire.cli.main import main
from tests.e2e.serving import Running, start
from tests.e2e.tiny import VOCAB, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer
from tests.worker.test_hosts import SECRET, running_worker

PROMPTS = [[5 + index, 9, 33, 7, 21] * 6 for index in range(6)]


def two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        with closing(socket.create_server(("127.0.0.1", 0))) as first:
            port: int = first.getsockname()[1]
            try:
                with closing(socket.create_server(("127.0.0.1", port + 1))):
                    return port
            except (OSError, OverflowError):
                continue


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    folder = tmp_path_factory.mktemp("replicas")
    make_model(folder / "base", "llama")
    write_tokenizer(folder / "base", extra_tokens=VOCAB - len(SPECIAL) - 95)
    (folder / "secret").write_text(SECRET)
    port, admin = two_free_ports(), f"unix:{folder}/admin"
    hosts = ["--executor", "hosts", "--hosts-address", f"127.0.0.1:{port}", "--hosts-secret-file", f"{folder}/secret"]
    with ExitStack() as stack:
        for index in range(2):
            stack.enter_context(running_worker(f"127.0.0.1:{port + index}"))
        flags = ["--served-model-name", "base", "--no-spare-engine", "--kv-cache-memory", "8MiB", "--admin", admin]
        running = start(str(folder / "base"), "-dp", "2", *hosts, *flags)
        yield running, admin
        assert running.stop() == 0, "".join(running.log)


def ctl(admin: str, *words: str) -> Any:
    assert main(["ctl", *words, "--admin", admin]) == 0


async def tokens(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    asked = {"model": "base", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json={**asked, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.nightly
async def test_replicas_on_hosts_go_and_come_back_and_no_request_notices(
    server: tuple[Running, str], capsys: pytest.CaptureFixture[str]
) -> None:
    running, admin = server
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        calm = [await tokens(client, prompt) for prompt in PROMPTS]
        ended = asyncio.Event()

        async def keep_asking() -> int:
            count = 0
            while not ended.is_set():
                found = await asyncio.gather(*(tokens(client, prompt) for prompt in PROMPTS))
                assert found == calm
                count += 1
            return count

        asking = asyncio.create_task(keep_asking())
        for count in ("1", "2"):
            await asyncio.to_thread(ctl, admin, "replicas", count)
            assert json.loads(capsys.readouterr().out)["replicas"] == int(count)
        await asyncio.to_thread(ctl, admin, "status")
        assert json.loads(capsys.readouterr().out)["num_replicas"] == 2
        ended.set()
        assert await asking > 0
    assert sum("replica 1 has left" in line for line in running.log) == 1
    assert sum("replica 1 serves now" in line for line in running.log) == 1
