"""`quire serve -dp 2 --api-server-count 2` on a tiny model: the bits of one process, and what processes share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.processes.forward import PROCESS_HEADER
from quire.types.sampling import SamplingParams
from tests.e2e.serving import Running, start
from tests.e2e.tiny import VOCAB, Driver, make_engine, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer

PROMPTS = [[5 + index, 9, 33, 7, 21] * 6 for index in range(6)]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("processes") / "base"
    make_model(folder, "llama")
    write_tokenizer(folder, extra_tokens=VOCAB - len(SPECIAL) - 95)
    flags = ["--served-model-name", "base", "--no-spare-engine", "--kv-cache-memory", "8MiB"]
    running = start(str(folder), "-dp", "2", "--api-server-count", "2", *flags)
    yield running, folder
    assert running.stop() == 0, "".join(running.log)


@contextmanager
def on_each(server: Running) -> Iterator[list[httpx.Client]]:
    """A client for each process: connections are made until both have accepted one."""
    found: dict[str, httpx.Client] = {}
    try:
        for _ in range(2000):
            client = httpx.Client(base_url=server.url, timeout=60)
            index = client.get("/health").headers[PROCESS_HEADER]
            if index in found:
                client.close()
            else:
                found[index] = client
            if len(found) == 2:
                break
        assert len(found) == 2
        yield [found["0"], found["1"]]
    finally:
        for client in found.values():
            client.close()


def asked(prompt: list[int]) -> dict[str, Any]:
    body = {"model": "base", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    return {**body, "ignore_eos": True, "return_token_ids": True}


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.nightly
async def test_two_processes_before_two_replicas_give_the_bits_of_one(server: tuple[Running, Path]) -> None:
    """Also when a replica is killed under load."""
    running, folder = server
    one = make_engine(folder, max_num_seqs=8, kv_cache_memory=8 << 20)
    driver, params = Driver(one), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, params)
    answers = driver.finish()
    alone = [answers[str(index)].token_ids for index in range(len(PROMPTS))]
    one.shutdown()
    with on_each(running) as clients:
        for client in clients:
            assert [tokens(client.post("/v1/completions", json=asked(prompt))) for prompt in PROMPTS] == alone
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        victims = [int(line.split("engine process ")[1]) for line in running.log if "replica 1 is ready" in line]
        work = asyncio.gather(*(client.post("/v1/completions", json=asked(prompt)) for prompt in PROMPTS * 4))
        while (await client.get("/load")).json()["server_load"] == 0:
            await asyncio.sleep(0.01)
        os.kill(victims[-1], signal.SIGKILL)
        assert [tokens(answer) for answer in await work] == alone * 4
        await asyncio.to_thread(running.wait_line, "replica 1 serves now")


@pytest.mark.nightly
def test_a_stored_response_is_found_by_both_processes(server: tuple[Running, Path]) -> None:
    with on_each(server[0]) as (first, second):
        body = {"model": "base", "input": "Hi", "max_output_tokens": 16}
        stored = first.post("/v1/responses", json=body).json()
        for client in (first, second):
            assert client.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
            answer = client.post("/v1/responses", json={**body, "previous_response_id": stored["id"]})
            assert answer.status_code == 200, answer.text
            assert answer.headers[PROCESS_HEADER] == "0"
        with second.stream("POST", "/v1/responses", json={**body, "stream": True, "background": True}) as events:
            begun = next(json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: "))
        with first.stream("GET", f"/v1/responses/{begun['response']['id']}?stream=true") as events:
            last = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: {")][-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        assert second.delete(f"/v1/responses/{stored['id']}").json()["deleted"]
        assert {client.get(f"/v1/responses/{stored['id']}").status_code for client in (first, second)} == {404}


@pytest.mark.nightly
def test_the_console_of_any_process_shows_the_whole_server(server: tuple[Running, Path]) -> None:
    with on_each(server[0]) as clients:
        for client in clients:
            with client.stream("GET", "/console/events") as lines:
                hello = json.loads(next(lines.iter_lines()))
            assert (hello["type"], hello["models"]) == ("hello", ["base"])
            assert hello["ended"], "the requests of both processes are known"
