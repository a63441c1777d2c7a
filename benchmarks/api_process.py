"""What the API process costs: HTTP, messages and detokenization for streams that a fake engine feeds.

    python benchmarks/api_process.py [--streams 64] [--rate 100] [--seconds 10]

The real server with the default model's tokenizer, over an engine process that says a random token to every request
at the rate given and computes nothing. Prints the CPU time of the API process per second, for both endpoints. Fewer
events than asked mean that the machine was busy: tokens that wait for a core are merged into one event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from processes import cpu_seconds
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.engine.constraints import Constraints
from quire.engine.parked import ParkedRequests
from quire.engine.process import serve
from quire.engine.zmq_client import OnPhase, ZmqClient
from quire.types.errors import EngineDeadError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.utils.log import setup_logging

LIMIT = 0.60  # of a core
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 49_000  # ordinary tokens of the default model
ENDPOINTS = {
    "completions": {"prompt": "Hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


class FakeCore:
    """As much of an EngineCore as EngineLoop needs: a token for everyone at every tick of a clock."""

    def __init__(self, rate: float) -> None:
        self._period = 1 / rate
        self._next = 0.0
        self._left: dict[str, int] = {}
        self._random = random.Random(0)
        self.constraints = Constraints()
        self.parked = ParkedRequests([self.constraints])
        self.executor = SimpleNamespace(on_failure=None)

    def add_request(self, request: EngineRequest) -> list[EngineOutput]:
        self._left[request.request_id] = request.max_tokens
        return []

    def abort(self, request_ids: list[str]) -> list[EngineOutput]:
        known = [i for i in request_ids if self._left.pop(i, None) is not None]
        return [EngineOutput(request_id, [], "abort") for request_id in known]

    def has_work(self) -> bool:
        return bool(self._left)

    def has_unfinished(self) -> bool:
        return self.has_work()

    def step(self) -> EngineOutputs:
        now = time.monotonic()
        self._next = max(self._next + self._period, now)
        time.sleep(self._next - now)
        outputs = []
        for request_id, left in list(self._left.items()):
            self._left[request_id] = left - 1
            finish = "length" if left == 1 else None
            token = self._random.randrange(3, VOCAB_SIZE)
            outputs.append(EngineOutput(request_id, [token], finish, num_cached_tokens=0, queue_time=0.0))
            if left == 1:
                del self._left[request_id]
        stats = EngineStats(len(self._left), 0, 1000, 500, step_tokens=len(outputs), step_time=self._period)
        return EngineOutputs(outputs, stats)

    def shutdown(self) -> None:
        self._left.clear()


def engine_process(rate: float) -> int:
    def build(config: EngineConfig, report: Any) -> Any:
        from quire.engine.loop import EngineLoop

        report("import")
        core: Any = FakeCore(rate)
        return EngineLoop(core), EngineInfo(VOCAB_SIZE, MAX_MODEL_LEN, 16, 1000, 256)

    return serve(build)


def api_process(rate: float) -> None:
    from quire.server.launch import run_server

    setup_logging("info")
    command = [sys.executable, __file__, "--engine", "--rate", str(rate)]

    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        return ZmqClient(config, on_phase=on_phase, command=command)

    run_server(EngineConfig.from_flat(model="smollm2"), ServerConfig(port=0), launch)


def start(rate: float) -> tuple[subprocess.Popen[str], int]:
    """The server and its port."""
    command = [sys.executable, __file__, "--serve", "--rate", str(rate)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on http://\S+:(\d+), ready", line):
            return process, int(found[1])
    raise EngineDeadError("the server did not start")


async def measure(pid: int, port: int, endpoint: str, streams: int, seconds: float) -> dict[str, float]:
    """CPU time of the process per second, and events per second that its clients got."""
    body = json.dumps({**ENDPOINTS[endpoint], "stream": True, "max_tokens": MAX_MODEL_LEN}).encode()
    head = f"POST /v1/{endpoint} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    num_events = 0
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(streams)]

    async def read(reader: asyncio.StreamReader) -> None:
        nonlocal num_events
        while data := await reader.read(1 << 16):
            num_events += data.count(b"data: ")

    for _, writer in connections:
        writer.write(request)
    readers = [asyncio.create_task(read(reader)) for reader, _ in connections]
    await asyncio.sleep(1)
    begin, cpu, events = time.monotonic(), cpu_seconds(pid), num_events
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - begin
    result = {
        "cpu_share": (cpu_seconds(pid) - cpu) / elapsed,
        "events_per_s": (num_events - events) / elapsed,
    }
    for task, (_, writer) in zip(readers, connections, strict=True):
        task.cancel()
        writer.close()
    await asyncio.gather(*readers, return_exceptions=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens per second of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--engine", action="store_true", help="be the engine")
    args = parser.parse_args()
    if args.engine:
        sys.exit(engine_process(args.rate))
    if args.serve:
        api_process(args.rate)
        return
    process, port = start(args.rate)
    results = {}
    try:
        for endpoint in ENDPOINTS:
            found = asyncio.run(measure(process.pid, port, endpoint, args.streams, args.seconds))
            results[endpoint] = found | {"events_per_s_asked": args.streams * args.rate, "limit": LIMIT}
    finally:
        process.terminate()
        process.communicate()
    show(results, args.streams, args.rate)
    print(f"written to {write_results('api_process', environment('quire', 'uvicorn', 'uvloop'), results)}")


def show(results: dict[str, dict[str, float]], streams: int, rate: float) -> None:
    title = f"API process, {streams} streams x {rate:g} tokens/s"
    table = Table("endpoint", "CPU, % of a core", "limit", "events/s", "of those asked", title=title)
    for name, row in results.items():
        reached = row["events_per_s"] / row["events_per_s_asked"]
        table.add_row(
            name, f"{row['cpu_share']:.1%}", f"{row['limit']:.0%}", f"{row['events_per_s']:,.0f}", f"{reached:.0%}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
