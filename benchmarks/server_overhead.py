"""What the server (HTTP, messages, detokenization) adds to the engine alone, on the default model.

    python benchmarks/server_overhead.py [--repeats 3]

Throughput: 16 requests at a time, 128 tokens in and 64 out, through `quire serve` and through an engine in this
process, by turns. First token: one request at a time, with a prompt of 32 tokens. The engine's side takes and gives
token ids: no HTTP, no messages between processes, no text. The best of the repeats counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from peers import DEFAULT_FOLDER, running
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire.bench.data import Sample
from quire.bench.options import DataOptions, LoadOptions, ServeOptions, TargetOptions
from quire.bench.serve import measure
from quire.config.engine import EngineConfig
from quire.engine.client import make_inproc_client
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

MODEL = "smollm2"
MAX_NUM_SEQS = 64  # as benchmarks/peers.py starts the server
STREAMS, INPUT, OUTPUT = 16, 128, 64
LIMITS = {"throughput": 0.08, "ttft_ms": 10.0}


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


class Engine:
    """The engine in this process, without a server around it."""

    def __init__(self) -> None:
        self._client = make_inproc_client(EngineConfig.from_flat(model=MODEL, max_num_seqs=MAX_NUM_SEQS))

    def run(self, token_ids: list[list[int]], outputs: int, concurrency: int) -> tuple[float, list[float]]:
        """Seconds for all of them, and the time to the first token of each."""
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        waiting = list(enumerate(token_ids))[::-1]
        sent: dict[str, float] = {}
        first: dict[str, float] = {}
        num_open = 0
        begin = time.perf_counter()
        while waiting or num_open:
            while waiting and num_open < concurrency:
                index, ids = waiting.pop()
                name = f"{begin}-{index}"
                sent[name] = time.perf_counter()
                request = EngineRequest(request_id=name, token_ids=ids, params=params, max_tokens=outputs)
                self._client.add_request(request)
                num_open += 1
            for output in self._client.get_outputs().outputs:
                if output.token_ids and output.request_id not in first:
                    first[output.request_id] = time.perf_counter() - sent[output.request_id]
                num_open -= output.finish_reason is not None
        return time.perf_counter() - begin, list(first.values())

    def stop(self) -> None:
        self._client.shutdown()


def serve(url: str, token_ids: list[list[int]], outputs: int, concurrency: int) -> tuple[float, list[float]]:
    """The same through the server, as `quire bench serve` measures it."""
    options = ServeOptions(
        data=DataOptions(token_ids=True),
        target=TargetOptions(base_url=url, ignore_eos=True),
        load=LoadOptions(max_concurrency=concurrency),
    )
    samples = [Sample(outputs, len(ids), token_ids=ids) for ids in token_ids]
    result = asyncio.run(measure(options, samples))
    assert result.summary.failed == 0
    return result.summary.duration_s, [record.ttft for record in result.records if record.ttft is not None]


Run = Callable[[list[list[int]], int, int], tuple[float, list[float]]]


def compare(url: str, repeats: int, requests: int) -> dict[str, Any]:
    engine = Engine()
    sides: dict[str, Run] = {"engine": engine.run, "server": partial(serve, url)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    firsts: dict[str, list[float]] = {side: [] for side in sides}
    try:
        for repeat in range(-1, repeats):  # the first time only warms up
            for side, run in sides.items():
                # Each side has a prefix cache of its own, so both may get the same prompts.
                seconds, _ = run(prompts(requests, INPUT, repeat), OUTPUT, STREAMS)
                _, first = run(prompts(20, 32, 1000 + repeat), 2, 1)
                if repeat >= 0:
                    rates[side].append(requests * OUTPUT / seconds)
                    firsts[side].append(1000 * statistics.median(first))
    finally:
        engine.stop()
    best = {side: max(rates[side]) for side in sides}
    ttft = {side: min(firsts[side]) for side in sides}
    return {
        "tokens_per_s": best,
        "tokens_per_s_all": rates,
        "throughput_lost": 1 - best["server"] / best["engine"],
        "ttft_ms": ttft,
        "ttft_ms_all": firsts,
        "ttft_added_ms": ttft["server"] - ttft["engine"],
        "limits": LIMITS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="requests of each throughput run")
    args = parser.parse_args()
    with running("quire", DEFAULT_FOLDER, MODEL) as server:
        results = compare(server.url, args.repeats, args.requests)
    show(results)
    print(f"written to {write_results('server_overhead', environment('quire', 'torch'), results)}")


def show(results: dict[str, Any]) -> None:
    table = Table("", "engine", "server", "added", "limit", title="What the server adds to the engine")
    rate, ttft = results["tokens_per_s"], results["ttft_ms"]
    lost, added = f"{results['throughput_lost']:.1%}", f"{results['ttft_added_ms']:.1f}"
    table.add_row(f"tokens/s, {STREAMS} streams", f"{rate['engine']:.1f}", f"{rate['server']:.1f}", lost, "8 %")
    table.add_row("TTFT of one, ms", f"{ttft['engine']:.1f}", f"{ttft['server']:.1f}", added, "10")
    Console().print(table)


if __name__ == "__main__":
    main()
