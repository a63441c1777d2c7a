"""`quire serve` in a process of its own, as tests need it: its log, its engine's process, its metrics."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.engine.processes import LIMIT, Watch
from tests.metrics.scrape import Scrape


@dataclass
class Running:
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        # Somebody has to read all the time, or the server would wait for room in the pipe.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first line of the log that matches, from line `after` on; waits for it while the server lives."""

        def find() -> re.Match[str] | None:
            return next((found for line in self.log[after:] if (found := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: find() or not self._reader.is_alive(), timeout=2 * LIMIT)
            found = find()
        assert found is not None, "".join(self.log)
        return found

    def engine_pid(self, after: int = 0) -> int:
        return int(self.wait_line(r"engine process (\d+) is ready", after)[1])

    def last_engine_pid(self) -> int:
        """Of the engine that runs now, after any restarts."""
        pids = [found[1] for line in self.log if (found := re.search(r"engine process (\d+) is ready", line))]
        return int(pids[-1])

    def stop(self) -> int:
        """Ask it to leave; its exit status. Neither it nor its engine is there afterwards."""
        engine = Watch(self.last_engine_pid())
        self.process.send_signal(signal.SIGTERM)
        status = self.wait()
        engine.wait()
        return status

    def wait(self) -> int:
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.log.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


SERVE = (sys.executable, "-m", "quire", "serve")


def launch(*flags: str, program: Sequence[str] = SERVE) -> Running:
    """Start a server, which need not become ready."""
    command = [*program, "--port", "0", *flags]
    return Running(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


def start(*flags: str, program: Sequence[str] = SERVE) -> Running:
    """Start a server and wait until it is ready."""
    running = launch(*flags, program=program)
    try:
        running.url = running.wait_line(r"serving on (http://\S+), ready")[1]
    except AssertionError:
        running.process.kill()
        running.wait()
        raise
    return running


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something to become true, with a limit."""
    async with asyncio.timeout(2 * LIMIT):
        while not await condition():
            await asyncio.sleep(0.02)


async def scrape(client: httpx.AsyncClient) -> Scrape:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return Scrape(answer.text)


async def assert_idle_and_serving(client: httpx.AsyncClient) -> None:
    """The engine gets idle with all its blocks free, and then serves the next request."""

    async def idle() -> bool:
        metrics = await scrape(client)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return metrics.get("engine_up") == 1 and all(metrics.get(name) == 0 for name in names)

    await eventually(idle)
    answer = await client.post("/v1/completions", json={"prompt": "next", "max_tokens": 2, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    await eventually(idle)


def events_of(text: str) -> list[Any]:
    """The JSON of each event of a whole stream; comments, which keep a slow one alive, are left out."""
    *blocks, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]
