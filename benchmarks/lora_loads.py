"""Adapters that come and go beside streams: what it does to the time between tokens, and to memory.

    python benchmarks/lora_loads.py [--model smollm2 | --shape qwen3-0.6b] [--streams 4] [--seconds 10] [--rounds 3]
                                    [--cycles 1000]

`quire serve --enable-lora`, on a model or on dummy weights of a shape of benchmarks/gpu.py. Phases with and without
loading take turns: adapters are loaded and unloaded as fast as the server answers, while streams run. What counts is
how much longer the slowest tokens take: at most 20 ms. Then so many cycles of load, a request and unload, with more
adapters than are kept in host memory, and how much memory both processes have after a tenth of them and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from itertools import count
from pathlib import Path

import httpx
from gpu import SHAPES
from lora import make_adapter as adapter_of_shape
from lora_cpu import make_adapter
from model_swap import dummy_models
from processes import resident_bytes
from report import environment, write_results
from takeover import server, wait_line

from quire.config.engine import EngineConfig

ADAPTERS, KEPT = 8, 4
KEY = "benchmark"
HEADERS = {"authorization": f"Bearer {KEY}"}


async def stream(client: httpx.AsyncClient, until: float, gaps: list[float]) -> None:
    body = {
        "model": "base",
        "prompt": [5] * 16,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    while time.perf_counter() < until:
        last = None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if not line.startswith("data: {"):
                    continue
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now > until:
                    break


async def cycle(client: httpx.AsyncClient, number: int, asks: bool) -> None:
    name = f"adapter{number % ADAPTERS}"
    loaded = {"lora_name": f"now-{number}", "lora_path": name}
    (await client.post("/v1/load_lora_adapter", json=loaded, headers=HEADERS)).raise_for_status()
    if asks:
        body = {"model": f"now-{number}", "prompt": [7] * 8, "max_tokens": 1}
        (await client.post("/v1/completions", json=body)).raise_for_status()
    gone = {"lora_name": f"now-{number}"}
    (await client.post("/v1/unload_lora_adapter", json=gone, headers=HEADERS)).raise_for_status()


async def phase(
    client: httpx.AsyncClient, streams: int, seconds: float, numbers: count[int] | None
) -> dict[str, float]:
    gaps: list[float] = []
    until = time.perf_counter() + seconds
    tasks = [asyncio.create_task(stream(client, until, gaps)) for _ in range(streams)]
    cycles = 0
    while numbers is not None and time.perf_counter() < until:
        await cycle(client, next(numbers), asks=False)
        cycles += 1
    await asyncio.gather(*tasks)
    gaps.sort()
    found = {"median": statistics.median(gaps), "p99": gaps[int(0.99 * len(gaps))], "worst": gaps[-1]}
    return {**{name: value * 1e3 for name, value in found.items()}, "tokens": len(gaps), "cycles": cycles}


async def measure(url: str, args: argparse.Namespace, pids: list[int]) -> dict[str, object]:
    numbers = count()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await cycle(client, next(numbers), asks=True)
        phases: dict[str, list[dict[str, float]]] = {"alone": [], "loading": []}
        for _ in range(args.rounds):
            for name, given in (("alone", None), ("loading", numbers)):
                found = await phase(client, args.streams, args.seconds, given)
                phases[name].append(found)
                print(name, {key: round(value, 1) for key, value in found.items()}, flush=True)
        memory = []
        for number in range(args.cycles):
            await cycle(client, next(numbers), asks=True)
            if number + 1 in (args.cycles // 10, args.cycles):
                memory.append([resident_bytes(pid) for pid in pids])
                print(f"{number + 1} cycles: {[f'{each / 2**20:.0f} MiB' for each in memory[-1]]}", flush=True)
    return {"milliseconds between tokens": phases, "resident bytes of server and engine": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", choices=list(SHAPES), help="of dummy weights, in place of a model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--served-model-name", "base"]
        if args.shape:
            args.model = dummy_models(Path(folder), args.shape)[0]
            flags += ["--load-format", "dummy", "--skip-tokenizer-init"]
        for index in range(ADAPTERS):
            to = Path(folder) / f"adapter{index}"
            if args.shape:
                adapter_of_shape(to, args.shape, 8, index)
            else:
                make_adapter(to, EngineConfig.from_flat(model=args.model), 8, index)
        flags += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", str(KEPT), "--lora-root", folder]
        os.environ["QUIRE_ADMIN_KEY"] = KEY
        with server(args.model, *flags, "--max-model-len", "512", "--no-spare-engine") as process:
            engine = int(wait_line(process, r"engine process (\d+) is ready"))
            url = wait_line(process, r"serving on (http://\S+), ready")
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()  # its log, which would fill the pipe
            results = asyncio.run(measure(url, args, [process.pid, engine]))
    print(json.dumps(results, indent=1)[-400:])
    print(f"written to {write_results('lora_loads', environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
