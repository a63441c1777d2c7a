"""What the pages cost: their first paint, and the console at many running requests, with and without a reader.

    python benchmarks/web.py [--part paint|watched|bookkeeping] [--requests 256] [--seconds 18] [--rounds 3]

`paint` opens both pages of `quire serve` in headless Chromium, as a new visitor each time. `watched` keeps the given
number of requests of the default model running: windows without and with a reader of /console/events take turns in
one run, and the CPU time of both processes and the tokens per second are compared. `bookkeeping` measures what the
server does for the console while nobody looks, and steps of a stub engine, recorded and not, in turn.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import msgspec
from processes import children, cpu_seconds
from report import environment, write_results

from quire.engine.core import EngineCore
from quire.engine.recorder import Recorder
from quire.engine.step_log import NO_LOG
from quire.kv.layout import plan_layout
from quire.kv.manager import KVCacheManager
from quire.metrics.stats import TokenEvent
from quire.sched.scheduler import Scheduler
from quire.sched.state import Limits
from quire.server.access import WEB_FILES
from quire.server.admin import Health
from quire.server.console.feed import INTERVAL, ConsoleFeed, WatchedEngine
from quire.server.console.monitor import ConsoleMonitor
from quire.server.web_pages import web_file
from quire.types.cache import LayerKV
from quire.types.console import ConsoleQuery
from quire.types.errors import EngineDeadError, EngineUnavailableError
from quire.types.outputs import EngineStats
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor

MAX_MODEL_LEN = 1024


@contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`quire serve smollm2`, ready, and its address."""
    command = [sys.executable, "-m", "quire", "serve", "smollm2", "--port", "0", "--no-spare-engine", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = None
        for line in process.stderr:
            if found := re.search(r"serving on (http://\S+:\d+), ready", line):
                break
        if found is None:
            raise EngineDeadError("the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader of its log
        yield process, found[1]
    finally:
        process.terminate()
        process.wait(120)


# First paint


def first_paint(rounds: int) -> dict[str, Any]:
    """Milliseconds from navigation to the first contentful paint, and when the chat can be written to."""
    from playwright.sync_api import sync_playwright

    size = sum(len(web_file(name)[0]) for name in ("chat.html", "console.html", *WEB_FILES))
    paints: dict[str, list[float]] = {"/": [], "/console": []}
    ready: list[float] = []
    with serving() as (_, url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(rounds):
            for path, found in paints.items():
                context = browser.new_context()
                page = context.new_page()
                page.goto(url + path)
                page.locator("body[data-ready]" if path == "/" else "body[data-frames]").wait_for()
                found.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
                if path == "/":
                    ready.append(page.evaluate("performance.getEntriesByName('quire-ready')[0].startTime"))
                context.close()
        browser.close()
    return {
        "bytes": size,
        "chat_first_paint_ms": statistics.median(paints["/"]),
        "chat_first_paint_worst_ms": max(paints["/"]),
        "chat_ready_ms": statistics.median(ready),
        "console_first_paint_ms": statistics.median(paints["/console"]),
        "console_first_paint_worst_ms": max(paints["/console"]),
    }


# The console of a real server


class Reader(threading.Thread):
    """Somebody who looks: reads the console's stream."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._is_ended = url, threading.Event()
        self.sizes: list[int] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("GET", f"{self._url}/console/events", timeout=60) as response:
            for line in response.iter_lines():
                self.sizes.append(len(line))
                if self._is_ended.is_set():
                    return

    def end(self) -> None:
        self._is_ended.set()
        self.join(60)


def generated_tokens(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(map(float, re.findall(r"^quire:generation_tokens_total\S* (\S+)$", text, re.M)))


def watched(num_requests: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Shares of a core and tokens per second, unwatched and watched; medians over the windows."""
    body = {"prompt": ["The sea is"] * num_requests, "max_tokens": MAX_MODEL_LEN, "ignore_eos": True, "seed": 1}
    windows: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    sizes: list[int] = []
    flags = f"--max-num-seqs {num_requests} --max-model-len {MAX_MODEL_LEN + 16} --kv-cache-memory 7GiB"
    with serving(*flags.split()) as (process, url):
        load = threading.Thread(target=_keep_running, args=(url, body), daemon=True)
        load.start()
        while generated_tokens(url) < num_requests * 4:
            time.sleep(0.5)
        (engine,) = children(process.pid)
        for number in range(2 * rounds + 1):
            reader = Reader(url) if number % 2 else None
            time.sleep(1.5)
            begin, tokens = time.monotonic(), generated_tokens(url)
            api, core = cpu_seconds(process.pid), cpu_seconds(engine)
            time.sleep(seconds)
            elapsed = time.monotonic() - begin
            windows[reader is not None].append(
                (
                    (cpu_seconds(process.pid) - api) / elapsed,
                    (cpu_seconds(engine) - core) / elapsed,
                    (generated_tokens(url) - tokens) / elapsed,
                )
            )
            if reader is not None:
                reader.end()
                sizes += reader.sizes[1:]
    plain, seen = ([statistics.median(column) for column in zip(*windows[key], strict=True)] for key in (False, True))
    speeds = {key: [window[2] for window in found] for key, found in windows.items()}
    # Contexts grow, so steps get longer: a watched window is compared with those before and after it.
    around = [(before + after) / 2 for before, after in pairwise(speeds[False])]
    ratios = [plain_speed / speed for plain_speed, speed in zip(around, speeds[True], strict=True)]
    return {
        "requests": num_requests,
        "api_cpu_share": plain[0],
        "api_cpu_share_watched": seen[0],
        "engine_cpu_share": plain[1],
        "engine_cpu_share_watched": seen[1],
        "tokens_per_s": plain[2],
        "tokens_per_s_watched": seen[2],
        "step_time_ratio": statistics.median(ratios),
        "bytes_per_frame": statistics.mean(sizes),
        "windows": {"unwatched": windows[False], "watched": windows[True]},
    }


def _keep_running(url: str, body: dict[str, Any]) -> None:
    with httpx.Client(timeout=None) as client:
        while True:
            try:
                client.post(f"{url}/v1/completions", json=body)
            except httpx.TransportError:  # the server has ended, and with it the measurement
                return


# Bookkeeping alone


class StubStep:
    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def sample(self, masks: object) -> None: ...

    def done(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> StepResult:
        return StepResult(self._plan.step_id, [[7] for _ in self._plan.rows])


class Stub(Executor):
    """Prompts fit into one step each, so every row samples."""

    def execute(self, plan: StepPlan) -> StubStep:
        return StubStep(plan)

    def is_sticky(self, error: Exception) -> bool:
        return False

    def shutdown(self) -> None: ...


class NoEngine:
    """A provider whose engine is looked at elsewhere."""

    @property
    def engine(self) -> WatchedEngine:
        raise EngineUnavailableError("there is none", retry_after=1)

    def health(self) -> Health:
        return Health("ready", "")


def make_core(num_requests: int) -> EngineCore:
    kv = KVCacheManager(plan_layout([LayerKV("full", None, 4)] * 2, 16), 65536, True)
    scheduler = Scheduler(
        Limits(
            max_num_seqs=num_requests,
            max_num_batched_tokens=1 << 20,
            long_prefill_token_threshold=1 << 20,
            max_model_len=1 << 16,
        ),
        policy="fcfs",
        kv=kv,
    )
    core = EngineCore(scheduler, Stub(), 1)
    for index in range(num_requests):
        prompt = [*range(256), *([index] * 700)]
        params = SamplingParams(max_tokens=1 << 14)
        core.add_request(EngineRequest(request_id=f"r{index}", token_ids=prompt, params=params, max_tokens=1 << 14))
    core.step()
    return core


def bookkeeping(num_requests: int) -> dict[str, Any]:
    core = make_core(num_requests)
    recorder = Recorder(core)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(800):
        is_recorded = number // 8 % 2
        core.watch = recorder if is_recorded else NO_LOG
        begin = time.perf_counter()
        core.step()
        times[is_recorded].append(time.perf_counter() - begin)
    monitor = ConsoleMonitor()
    feed, marks = ConsoleFeed(NoEngine(), monitor, ("m",)), monitor.begin()[0]
    looks, frames, query = [], [], ConsoleQuery()
    for _ in range(40):
        for _ in range(20):  # steps between two looks
            core.step()
        begin = time.thread_time()
        view = recorder.view(query)
        looks.append(time.thread_time() - begin)
        begin = time.thread_time()
        msgspec.json.encode(feed.frame(view, marks))
        frames.append(time.thread_time() - begin)
        query = ConsoleQuery(view.steps[-1].id, view.events[-1].number if view.events else -1)
    event = TokenEvent(num_requests, token_latencies={0.01: num_requests})
    stats = EngineStats(num_requests, 0, 65536, 0)
    begin = time.thread_time()
    for _ in range(10_000):
        monitor.on_stats(stats)
        monitor.on_tokens(event)
    unwatched = (time.thread_time() - begin) / 10_000
    return {
        "step_us": 1e6 * statistics.median(times[0]),
        "step_us_recorded": 1e6 * statistics.median(times[1]),
        "engine_share_watched": statistics.mean(looks) / INTERVAL,
        "server_share_watched": statistics.mean(frames) / INTERVAL,
        "server_us_per_step_unwatched": 1e6 * unwatched,
        "server_share_unwatched_at_100_steps_per_s": 100 * unwatched,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["paint", "watched", "bookkeeping"], help="absent: all")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=18.0, help="of each window of `watched`")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    parts = {
        "paint": lambda: first_paint(args.rounds),
        "watched": lambda: watched(args.requests, args.seconds, args.rounds),
        "bookkeeping": lambda: bookkeeping(args.requests),
    }
    results = {name: run() for name, run in parts.items() if args.part in (None, name)}
    for name, found in results.items():
        print(name)
        for key, value in found.items():
            if not isinstance(value, dict):
                print(f"  {key:<44} {value:,.4g}")
    if args.part is None:
        print(f"written to {write_results('web', environment('quire', 'uvicorn', 'playwright'), results)}")


if __name__ == "__main__":
    main()
