"""A trace of many requests: recorded, and replayed to the same hash, at least as fast.

    python benchmarks/replay.py [--requests 10000] [--tokens 4] [--model smollm2]

Requests come at random moments, so that steps mix prompts and decoding; some are greedy and some sampled.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import environment, write_results

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.loop import EngineLoop
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

AT_ONCE = 64


def request(index: int, tokens: int, draw: random.Random) -> EngineRequest:
    count = draw.randint(1, 2 * tokens - 1)
    return EngineRequest(
        request_id=str(index),
        token_ids=[draw.randrange(100, 40_000) for _ in range(draw.randint(1, 16))],
        params=SamplingParams(max_tokens=count, temperature=draw.choice([0.0, 0.8]), ignore_eos=True),
        seed=draw.getrandbits(40),
        max_tokens=count,
    )


def record(args: argparse.Namespace, path: Path) -> float:
    """Seconds from the first request to the end of the last."""
    core, _, _ = build_engine(EngineConfig.from_flat(model=args.model, trace=str(path), trace_size=4 << 30))
    loop, draw = EngineLoop(core), random.Random(0)
    waiting = [request(index, args.tokens, draw) for index in range(args.requests)][::-1]
    num_open, begin = 0, time.perf_counter()
    while waiting or loop.has_unfinished():
        while waiting and num_open < AT_ONCE and draw.random() < 0.9:
            loop.submit(waiting.pop())
            num_open += 1
        num_open -= sum(output.finish_reason is not None for output in loop.run_once().outputs)
    seconds = time.perf_counter() - begin
    loop.shutdown()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=4, help="of an answer, on average")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        recorded = record(args, path)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"recorded {args.requests} requests in {recorded:.1f} s, {size >> 10} KiB", flush=True)
        command = [sys.executable, "-m", "quire", "replay", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    found = re.search(r"EQUAL: (\d+) steps, (\d+) requests, hash (\w+) \(([\d.]+) s", done.stdout)
    if found is None:
        raise SystemExit("the replay differs")
    results = {
        **vars(args),
        "steps": int(found[1]),
        "replayed_requests": int(found[2]),
        "hash": found[3],
        "recorded_seconds": recorded,
        "replayed_seconds": float(found[4]),
        "trace_bytes": size,
    }
    print(f"written to {write_results('replay', environment('quire', 'torch'), results)}")


if __name__ == "__main__":
    main()
