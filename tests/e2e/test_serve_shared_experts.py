"""`quire serve -dp 2 --enable-expert-parallel`: a replica that is lost costs no token, and stopping no answer."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Running, start
from tests.e2e.test_serve_replicas import PROMPTS, tokens, tokens_of_one_process
from tests.e2e.tiny import VOCAB, make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer
from tests.worker.test_multiproc import is_alive, wait_until
from tests.worker.test_shared_experts import SMALL


def replicas_of(running: Running) -> list[int]:
    """The two that became ready last."""
    return [int(found[1]) for line in running.log if (found := re.search(r"is ready in engine process (\d+)", line))][
        -2:
    ]


def all_gone(pids: Iterable[int]) -> bool:
    return not any(map(is_alive, pids))


@pytest.mark.nightly
async def test_a_replica_that_is_lost_takes_the_others_along_and_no_token_is_lost(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base", **SMALL)
    write_tokenizer(model, extra_tokens=VOCAB - len(SPECIAL) - 95)
    expected = tokens_of_one_process(model, device="cpu")
    flags = ["--served-model-name", "base", "--no-spare-engine", "--kv-cache-memory", "8MiB", "--device", "cpu"]
    running = start(str(model), *flags, "-dp", "2", "--enable-expert-parallel")
    seen: list[int] = []
    try:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:

            async def ask_all() -> None:
                assert await asyncio.gather(*(tokens(client, prompt) for prompt in PROMPTS)) == expected

            await ask_all()
            for number in (signal.SIGKILL, signal.SIGSTOP):
                before = replicas_of(running)
                seen += before
                asking = asyncio.create_task(ask_all())
                while (await client.get("/load")).json()["server_load"] == 0:
                    await asyncio.sleep(0.01)
                os.kill(before[1], number)
                await asking
                wait_until(partial(all_gone, before))
                assert not set(replicas_of(running)) & set(before)
            seen += replicas_of(running)
            asking = asyncio.create_task(ask_all())
            while (await client.get("/load")).json()["server_load"] == 0:
                await asyncio.sleep(0.01)
            for pid in replicas_of(running):  # as who ends a whole group of processes does, the server last
                os.kill(pid, signal.SIGTERM)
            running.process.send_signal(signal.SIGTERM)
            await asking
        assert running.wait() == 0, "".join(running.log)
    finally:
        running.process.kill()
    wait_until(lambda: not any(map(is_alive, seen)))
