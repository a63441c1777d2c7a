"""Plan against measurement: what `quire plan` says of three loads, and what an engine really does with them.

    python benchmarks/capacity.py [--models smollm2 | qwen3-0.6b llama-8b] [--machine NAME] [--seconds 30]
                                  [--tables FOLDER] [--keep-tables] [--bench-seconds 90] [--warm-rounds 1]
                                  [--out NAME]

For each model: `quire bench steps` measures its cost table, then an engine process gets each load twice. The same
requests come at the same moments in virtual time. Compared are TTFT and ITL (median and p90) and throughput, at the
engine's client; HTTP is not in them. A load's rate is half of what the plan says the machine can do. Models of
gpu.py's table have dummy weights. The error may be 10 % (5 % of throughput), or the spread of the two runs if that
is larger; runs that differ by more than a third prove nothing. A round before them does not count: kernels are
loaded and graphs captured in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu import SHAPES
from report import environment, write_results
from rich.console import Console
from rich.table import Table

import quire
from quire.config.engine import EngineConfig
from quire.engine.zmq_client import ZmqClient
from quire.replay.capacity import measure
from quire.replay.costs import CostTable, read_table
from quire.replay.workload import Workload
from quire.types.request import EngineRequest

TABLES = Path(quire.__file__).parent / "replay" / "tables"
LOADS = {
    "chat": Workload(input_len=128, output_len=64),
    "long prompts": Workload(input_len=768, output_len=16),
    "batch": Workload(input_len=64, output_len=64, max_concurrency=16),
}
BOUNDS = {"ttft_p50": 0.10, "ttft_p90": 0.10, "itl_p50": 0.10, "itl_p90": 0.10, "output_tokens_per_s": 0.05}
MOST_SPREAD = 1 / 3  # of two runs that say anything about a plan
SATURATED = 64  # requests that say how much the machine can do
BUSY = 0.5  # part of that


@contextmanager
def model_folder(model: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where to run with the model's name, and the settings that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {}
        if model in SHAPES:
            shape = {"max_position_embeddings": 40960, "hidden_act": "silu", "eos_token_id": 2, **SHAPES[model]}
            (Path(folder) / model).mkdir()
            (Path(folder) / model / "config.json").write_text(json.dumps(shape))
            settings = {"load_format": "dummy", "max_model_len": 16384, "max_num_seqs": 256}
        yield Path(folder), settings


def bench_steps(
    model: str, machine: str, folder: Path, settings: dict[str, Any], path: Path, seconds: float = 90.0
) -> CostTable:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "quire", "bench", "steps", model, "--machine", machine, "--table", path.name]
    command += ["--seconds", str(seconds)]
    begin = time.monotonic()
    subprocess.run([*command, *flags], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    shutil.copyfile(folder / path.name, path)
    print(f"{model}: cost table in {time.monotonic() - begin:.0f} s: {path}", flush=True)
    return read_table(path)


@dataclass
class Run:
    """One load on a real engine."""

    client: ZmqClient
    load: Workload
    open: dict[str, float] = field(default_factory=dict)  # request -> when it was sent, then its last token
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    first: set[str] = field(default_factory=set)
    num_tokens: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # polling would take time from the engine's cores

    async def run(self) -> dict[str, float]:
        await self.client.call_async("reset_prefix_cache")
        reading = asyncio.create_task(self._read())
        begin = time.monotonic()
        for due, make in self.load.arrivals():
            await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
            await self._fewer_than(self.load.max_concurrency or math.inf)
            self._send(make())
        await self._fewer_than(1)
        seconds = time.monotonic() - begin
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return figures(
            {f"p{p}": 1000 * percentile(self.ttft, p) for p in (50, 90)},
            {f"p{p}": 1000 * percentile(self.itl, p) for p in (50, 90)},
            self.num_tokens / seconds,
        )

    async def _fewer_than(self, most: float) -> None:
        while len(self.open) >= most:
            self.ended.clear()
            await self.ended.wait()

    def _send(self, request: EngineRequest) -> None:
        self.open[request.request_id] = time.monotonic()
        self.client.add_request(request)

    async def _read(self) -> None:
        while True:
            for output in (await self.client.get_outputs_async()).outputs:
                now, name = time.monotonic(), output.request_id
                assert output.error is None, output.error
                if output.token_ids:
                    (self.itl if name in self.first else self.ttft).append(now - self.open[name])
                    self.first.add(name)
                    self.open[name] = now
                    self.num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    del self.open[name]
                    self.ended.set()


def percentile(values: list[float], percent: int) -> float:
    """As quire/replay/capacity.py counts it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def figures(ttft: dict[str, float], itl: dict[str, float], rate: float) -> dict[str, float]:
    times = {f"{name}_{p}": of[p] for name, of in (("ttft", ttft), ("itl", itl)) for p in ("p50", "p90")}
    return {**times, "output_tokens_per_s": rate}


def planned(table: CostTable, load: Workload) -> dict[str, float]:
    found = measure(table.setup, table, load.arrivals(), max_concurrency=load.max_concurrency)
    return figures(found.ttft_ms, found.itl_ms, found.output_tokens_per_s)


def sized(table: CostTable, load: Workload, seconds: float) -> Workload:
    """The load at a rate that leaves the machine some rest, with requests for about this many seconds."""
    full = replace(load, num_prompts=SATURATED)
    most = measure(table.setup, table, full.arrivals(), max_concurrency=load.max_concurrency).requests_per_s
    if load.max_concurrency is not None:
        return replace(load, num_prompts=max(2 * load.max_concurrency, round(most * seconds)))
    rate = float(f"{BUSY * most:.3g}")
    return replace(load, num_prompts=max(16, round(rate * seconds)), request_rate=rate)


async def measured(
    config: EngineConfig, loads: dict[str, Workload], warm_rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Each load twice, in turns, after some requests of each and after whole rounds."""
    client = ZmqClient(config)
    await client.wait_ready_async()
    try:
        for load in loads.values():
            await Run(client, replace(load, num_prompts=8, request_rate=math.inf, max_concurrency=8)).run()
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
        for number in range(warm_rounds + 2):
            for name, load in loads.items():
                found = await Run(client, load).run()
                print(f"  {name}: {found}", flush=True)
                if number >= warm_rounds:
                    runs[name].append(found)
    finally:
        await client.stop_async()
        client.shutdown()
    return runs


def compared(plan: dict[str, float], runs: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, bound in BOUNDS.items():
        values = [run[name] for run in runs]
        mean = sum(values) / len(values)
        spread, error = abs(values[0] - values[1]) / mean, plan[name] / mean - 1
        row = {"planned": plan[name], "measured": values, "error": error, "spread": spread}
        holds = abs(error) <= max(bound, spread)
        found[name] = {**row, "bound": max(bound, spread), "holds": holds, "agree": spread <= MOST_SPREAD}
    return found


def compare(model: str, args: argparse.Namespace) -> dict[str, Any]:
    with model_folder(model) as (folder, settings):
        path = args.tables / f"{args.machine}-{model}.json"
        is_there = args.keep_tables and path.exists()
        new = partial(bench_steps, model, args.machine, folder, settings, path, args.bench_seconds)
        table = read_table(path) if is_there else new()
        loads = {name: sized(table, load, args.seconds) for name, load in LOADS.items()}
        where = str(folder / model) if model in SHAPES else model
        runs = asyncio.run(measured(EngineConfig.from_flat(model=where, **settings), loads, args.warm_rounds))
    results = {}
    for name, load in loads.items():
        found = compared(planned(table, load), runs[name])
        shape = {"requests": load.num_prompts, "input_len": load.input_len, "output_len": load.output_len}
        rate = None if load.request_rate == math.inf else load.request_rate
        results[name] = {**shape, "request_rate": rate, "max_concurrency": load.max_concurrency, "figures": found}
    return results


def show(model: str, results: dict[str, Any]) -> None:
    grid = Table("load", "figure", "planned", "measured", "error", "bound", "", title=model)
    for load, result in results.items():
        for name, row in result["figures"].items():
            both = " / ".join(f"{value:.4g}" for value in row["measured"])
            holds = "runs disagree" if not row["agree"] else "" if row["holds"] else "beyond"
            grid.add_row(
                load, name, f"{row['planned']:.4g}", both, f"{row['error']:+.1%}", f"{row['bound']:.1%}", holds
            )
    Console(width=110).print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2"], metavar="MODEL")
    parser.add_argument("--machine", default="epyc-2-cores", help="what the cost tables call this machine")
    parser.add_argument("--seconds", type=float, default=30.0, help="about how long each load takes")
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of cost tables; default: the package's")
    parser.add_argument("--keep-tables", action="store_true", help="use the tables that are there already")
    parser.add_argument("--bench-seconds", type=float, default=90.0, help="about how long a table is measured")
    parser.add_argument("--warm-rounds", type=int, default=1, help="runs of each load that do not count")
    parser.add_argument("--out", default="capacity", help="name of the results; default %(default)s")
    args = parser.parse_args()
    args.tables = args.tables.resolve()
    results: dict[str, Any] = {"load_average": os.getloadavg()[0]}  # before: above 1, others were at work
    for model in args.models:
        results[model] = compare(model, args)
        show(model, results[model])
    print(f"written to {write_results(args.out, environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
