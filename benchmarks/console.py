"""What the console costs at 256 running requests: in the engine per look and per step, in the server per frame.

The model is a stub that gives token 7, so that only the bookkeeping is measured. Watched and unwatched steps take
turns in one run.

    python benchmarks/console.py [--requests 256] [--blocks 65536]
"""

from __future__ import annotations

import argparse
import statistics
import time

import msgspec

from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.engine.recorder import Recorder
from quire.engine.step_log import NO_LOG
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.scheduler import Scheduler
from quire.server.console.feed import INTERVAL, ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor
from quire.types.console import ConsoleQuery, EngineView
from quire.types.messages import Command, Reply
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor


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


def make_core(num_requests: int, num_blocks: int) -> EngineCore:
    kv = KVCacheManager(plan_layout([LayerKV("full", None, 4)] * 2, 16), num_blocks, True)
    scheduler = Scheduler(
        max_num_seqs=num_requests,
        max_num_batched_tokens=1 << 20,
        long_prefill_token_threshold=1 << 20,
        policy="fcfs",
        max_model_len=1 << 16,
        kv=kv,
    )
    core = EngineCore(scheduler, Stub(), 1)
    for index in range(num_requests):
        prompt = [*range(256), *([index] * 700)]
        params = SamplingParams(max_tokens=1 << 14)
        core.add_request(EngineRequest(request_id=f"r{index}", token_ids=prompt, params=params, max_tokens=1 << 14))
    core.step()
    return core


def step_times(core: EngineCore, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, unwatched and watched."""
    times: tuple[list[float], list[float]] = ([], [])
    recorder = Recorder(core)
    for number in range(rounds):
        watched = number // 8 % 2
        core.watch = recorder if watched else NO_LOG
        begin = time.perf_counter()
        core.step()
        times[watched].append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


class Provider:
    """Only what a feed asks for."""

    def health(self) -> object:
        return type("Health", (), {"status": "ready", "detail": ""})()


def frame_seconds(core: EngineCore, rounds: int) -> tuple[float, float, int]:
    """CPU seconds of a look in the engine and of a frame in the server, and the frame's bytes."""
    feed = ConsoleFeed(Provider(), ConsoleMonitor(), ("m",))  # type: ignore[arg-type]
    marks = feed._monitor.begin()[0]
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Reply).decode
    engine, server, size, query = [], [], 0, ConsoleQuery()
    for _ in range(rounds):
        for _ in range(20):  # steps between two looks
            core.step()
        begin = time.thread_time()
        sent = encode(obey(core, Command(0, "console", msgspec.to_builtins(query))))
        engine.append(time.thread_time() - begin)
        begin = time.thread_time()
        view = msgspec.convert(decode(sent).value, EngineView)
        line = msgspec.json.encode(feed._frame(view, marks))
        server.append(time.thread_time() - begin)
        size = len(line)
        query = ConsoleQuery(view.steps[-1].id, view.events[-1].number if view.events else -1)
    return statistics.mean(engine), statistics.mean(server), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=65536)
    args = parser.parse_args()
    core = make_core(args.requests, args.blocks)
    plain, watched = step_times(core, 800)
    engine, server, size = frame_seconds(core, 40)
    per_second = 1 / INTERVAL
    print(f"{args.requests} requests, {args.blocks} blocks")
    print(f"step bookkeeping   {1e6 * plain:8.0f} us, watched {1e6 * watched:.0f} us, ratio {watched / plain:.3f}")
    print(f"engine, per look   {1e3 * engine:8.2f} ms, {100 * engine * per_second:.2f} % of a core")
    print(f"server, per frame  {1e3 * server:8.2f} ms, {100 * server * per_second:.2f} % of a core, {size} bytes")


if __name__ == "__main__":
    main()
