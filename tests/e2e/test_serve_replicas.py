"""`quire serve -dp` with ranks that join from other hosts; replicas that go and come back while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.cli.main import main
from quire.types.sampling import SamplingParams
from tests.e2e.serving import Running, start
from tests.e2e.tiny import VOCAB, Driver, make_engine, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer
from tests.worker.test_hosts import SECRET, running_worker
from tests.worker.test_multiproc import is_alive, wait_until

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


def tokens_of_one_process(model: Path, **settings: Any) -> list[list[int]]:
    """What each of PROMPTS is answered with, as `tokens` asks it of a server."""
    one = make_engine(model, max_num_seqs=8, kv_cache_memory=8 << 20, **settings)
    driver, params = Driver(one), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, params)
    answers = driver.finish()
    one.shutdown()
    return [answers[str(index)].token_ids for index in range(len(PROMPTS))]


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


def ranks_of(server: int) -> dict[int, int]:
    """pid -> parent of every rank below a server."""
    parents, ranks = {}, []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if "quire.worker.rank" in (folder / "cmdline").read_text():
                ranks.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {pid: parents[pid] for pid in ranks if pid in parents and parents.get(parents[pid]) == server}


@pytest.mark.nightly
async def test_two_replicas_of_two_ranks_give_the_tokens_of_one_process_and_outlive_a_rank(tmp_path: Path) -> None:
    """SIGKILL of a rank under load: its replica is replaced alone, every request has its tokens, nobody is left."""
    model = make_model(tmp_path / "base", "llama")
    write_tokenizer(model, extra_tokens=VOCAB - len(SPECIAL) - 95)
    expected = tokens_of_one_process(model)
    flags = ["--served-model-name", "base", "--no-spare-engine", "--kv-cache-memory", "8MiB", "-dp", "2", "-tp", "2"]
    running = start(str(model), *flags)
    try:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:

            async def ask_all() -> None:
                assert await asyncio.gather(*(tokens(client, prompt) for prompt in PROMPTS)) == expected

            await ask_all()
            before = ranks_of(running.process.pid)
            assert len(before) == 4
            asking = asyncio.create_task(ask_all())
            while (await client.get("/load")).json()["server_load"] == 0:
                await asyncio.sleep(0.01)
            victim, engine = next(item for item in before.items() if item[1] != running.last_engine_pid())
            os.kill(victim, signal.SIGKILL)
            killed_at = time.monotonic()
            await asyncio.to_thread(
                running.wait_line, rf"replica \d died: .*process {victim}\) was killed by SIGKILL"
            )
            assert time.monotonic() - killed_at < 5.0
            await asking
            await asyncio.to_thread(running.wait_line, r"replica \d serves now")
            after = ranks_of(running.process.pid)
            assert len(after) == 4
            assert {pid for pid, parent in before.items() if parent != engine} < after.keys()
            assert engine not in after.values()
            await ask_all()
    finally:
        assert running.stop() == 0, "".join(running.log)
    wait_until(lambda: not any(map(is_alive, (*before, *after))))
