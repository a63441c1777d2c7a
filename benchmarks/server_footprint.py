"""What a server holds and burns over time: memory after 200 and after 2,000 short requests, and CPU while idle.

    python benchmarks/server_footprint.py [--requests 2000] [--idle 20]

`quire serve` on the default model; both of its processes are looked at. Linux only. The KV cache has a size that the
first 200 requests fill: the system gives its memory page by page as blocks are first used, up to what was planned at
the start; what grows after that is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from peers import DEFAULT_FOLDER, Running, running
from processes import children, cpu_seconds, resident_bytes
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire.bench.data import load_samples
from quire.bench.options import DataOptions, LoadOptions, ServeOptions, TargetOptions
from quire.bench.serve import measure

MODEL = "smollm2"
KV_MEMORY = "64MiB"
FIRST = 200
LIMITS = {"memory_growth": 0.03, "idle_cpu": 0.01}


def send(url: str, count: int, seed: int) -> None:
    """Short requests of all lengths, 16 at a time."""
    options = ServeOptions(
        data=DataOptions(num_prompts=count, input_len=16, output_len=8, range_ratio=0.75, seed=seed),
        target=TargetOptions(base_url=url),
        load=LoadOptions(max_concurrency=16),
    )
    result = asyncio.run(measure(options, load_samples(options.data), progress=True))
    assert result.summary.failed == 0


def idle_shares(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """CPU time per second while nobody asks for anything."""
    time.sleep(1)  # the last log line, the last connections closing
    begin, before = time.monotonic(), {name: cpu_seconds(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    elapsed = time.monotonic() - begin
    return {name: (cpu_seconds(pid) - before[name]) / elapsed for name, pid in pids.items()}


def look(server: Running, requests: int, idle: float) -> dict[str, Any]:
    (engine,) = children(server.process.pid)
    pids = {"API": server.process.pid, "engine": engine}
    fresh_idle = idle_shares(pids, idle)
    send(server.url, FIRST, seed=0)
    early = {name: resident_bytes(pid) for name, pid in pids.items()}
    send(server.url, requests - FIRST, seed=1)
    late = {name: resident_bytes(pid) for name, pid in pids.items()}
    used_idle = idle_shares(pids, idle)
    return {
        name: {
            "idle_cpu": max(fresh_idle[name], used_idle[name]),
            "resident_early": early[name],
            "resident_late": late[name],
            "growth": late[name] / early[name] - 1,
        }
        for name in pids
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--idle", type=float, default=20.0, help="seconds to look at an idle server, twice")
    args = parser.parse_args()
    with running("quire", DEFAULT_FOLDER, MODEL, ("--kv-cache-memory", KV_MEMORY)) as server:
        found = look(server, args.requests, args.idle)
    results = {"requests": args.requests, "kv_cache_memory": KV_MEMORY, "limits": LIMITS, "processes": found}
    show(found, args.requests)
    print(f"written to {write_results('server_footprint', environment('quire', 'torch'), results)}")


def show(found: dict[str, dict[str, float]], requests: int) -> None:
    title = "Footprint of quire serve (limits: 3 % growth, 1 % of a core in all)"
    table = Table("process", f"MB after {FIRST}", f"MB after {requests}", "growth", "idle CPU", title=title)
    for name, row in found.items():
        early, late = row["resident_early"] / 1e6, row["resident_late"] / 1e6
        table.add_row(name, f"{early:.1f}", f"{late:.1f}", f"{row['growth']:+.1%}", f"{row['idle_cpu']:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
