"""What a GPU server's first load waits for: kernels compiled and steps recorded when they first come up.

    python benchmarks/first_load.py [--model qwen3-0.6b] [--idle] [--empty-cache] [--out FILE]

Two loads after a start on dummy weights, each of 120 requests of 10 to 1,500 tokens within 3 s, a third of them
drawn, 20 to 200 tokens each. With --idle the engine first has nothing to do until it has prepared all it prepares by
itself; with --empty-cache no kernel was compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpu import SHAPES, Bench
from report import environment

from quire.engine.client import InProcClient
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

REQUESTS, SECONDS = 120, 3.0


class Compiles:
    """Counts variants of kernels that were compiled, and the seconds each kernel took."""

    def __init__(self) -> None:
        from triton import knobs

        self.counts: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        knobs.compilation.listener = self._count

    def _count(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.counts[src.name] += 1
            self.seconds[src.name] += times.total / 1e6

    def take(self) -> dict[str, list[float]]:
        """[variants, seconds] of each kernel since the last time, the slowest first."""
        names = sorted(self.seconds, key=lambda name: -self.seconds[name])
        taken = {name: [self.counts[name], round(self.seconds[name], 2)] for name in names}
        self.counts.clear()
        self.seconds.clear()
        return taken


def load(bench: Bench, number: int) -> dict[str, float]:
    """Milliseconds to first tokens and between outputs of one load, as it arrives."""
    chance = random.Random(number)
    arrivals = sorted(chance.uniform(0.0, SECONDS) for _ in range(REQUESTS))
    began = time.perf_counter()
    last: dict[str, float] = {}
    first: dict[str, float] = {}
    gaps: list[float] = []
    sent = 0
    while sent < REQUESTS or bench.client.has_unfinished():
        while sent < REQUESTS and time.perf_counter() - began >= arrivals[sent]:
            drawn = {"temperature": 0.8, "top_p": 0.95} if sent % 3 == 0 else {"temperature": 0.0}
            tokens = chance.randint(20, 200)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **drawn)
            name = f"{number}-{sent}"
            last[name] = began + arrivals[sent]
            prompt = bench.prompt(chance.randint(10, 1500))
            bench.client.add_request(
                EngineRequest(request_id=name, token_ids=prompt, params=params, max_tokens=tokens, seed=sent)
            )
            sent += 1
        if not bench.client.has_unfinished():
            time.sleep(0.001)
            continue
        for output in bench.client.get_outputs().outputs:
            assert output.error is None, output.error
            now, name = time.perf_counter(), output.request_id
            if output.token_ids:
                waited = 1e3 * (now - last[name])
                if name in first:
                    gaps.append(waited)
                else:
                    first[name] = waited
                last[name] = now
    gaps.sort()
    return {
        "first token, median": round(statistics.median(first.values()), 1),
        "first token, longest": round(max(first.values()), 1),
        "between tokens, 99 of 100": round(gaps[len(gaps) * 99 // 100], 1),
        "between tokens, longest": round(gaps[-1], 1),
        "all": round(1e3 * (time.perf_counter() - began), 1),
    }


def measure(model: str, idle: bool, compiles: Compiles) -> dict[str, Any]:
    bench = Bench(model)
    found: dict[str, Any] = {"ready, s": round(bench.ready, 2), "compiled for the start": compiles.take()}
    if idle:
        client = bench.client
        assert isinstance(client, InProcClient)
        began = time.perf_counter()
        prepared = 0
        while client._core.capture_next():
            prepared += 1
        found["prepared while idle"] = {"steps": prepared, "s": round(time.perf_counter() - began, 2)}
        found["compiled while idle"] = compiles.take()
    for number, name in enumerate(("first load", "second load")):
        found[f"{name}, ms"] = load(bench, number)
        found[f"compiled for the {name}"] = compiles.take()
    bench.client.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--idle", action="store_true", help="let the engine prepare before the first load")
    parser.add_argument("--empty-cache", action="store_true", help="compile all kernels anew")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        if args.empty_cache:
            os.environ["TRITON_CACHE_DIR"] = cache
        results = measure(args.model, args.idle, Compiles())
    settings = {"model": args.model, "idle first": args.idle, "compiled before": not args.empty_cache}
    report = {"environment": environment("torch", "triton"), **settings, "results": results}
    print(json.dumps(results, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
