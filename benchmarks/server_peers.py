"""Quire's server beside vLLM's and llama.cpp's: the same client, the same weights, one run, by turns.

    python benchmarks/server_peers.py [--folder ~/.cache/quire-peers] [--repeats 2] [--peers quire vllm llama.cpp]

16 requests at a time, 128 tokens in, 64 out, measured as `quire bench serve` does. One server runs at a time; the
repeats go around, and the best of each counts. Most of the time is vLLM's start. The first run installs the peers
(see benchmarks/peers.py).
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from peers import DEFAULT_FOLDER, SERVERS, Running, running, version
from report import environment, write_results
from rich.console import Console
from rich.table import Table

from quire.bench.data import load_samples
from quire.bench.options import DataOptions, LoadOptions, ServeOptions, TargetOptions
from quire.bench.serve import measure

CONCURRENCY, INPUT, OUTPUT = 16, 128, 64
REQUEST_LIMIT = 1800.0  # seconds; a slow machine is no failure of the server


def measure_peer(peer: str, folder: Path, num_prompts: int, seed: int) -> dict[str, Any]:
    print(f"{peer}: starting", flush=True)
    with running(peer, folder) as server:
        print(f"{peer}: ready after {server.start_seconds:.1f} s, sending {num_prompts} requests", flush=True)
        return measure_server(server, num_prompts, seed)


def measure_server(server: Running, num_prompts: int, seed: int) -> dict[str, Any]:
    warmup = min(CONCURRENCY, num_prompts)
    options = ServeOptions(
        data=DataOptions(num_prompts=num_prompts, input_len=INPUT, output_len=OUTPUT, seed=seed),
        target=TargetOptions(base_url=server.url, request_timeout=REQUEST_LIMIT),
        load=LoadOptions(max_concurrency=CONCURRENCY, warmup=warmup),
    )
    samples = load_samples(options.data, extra=warmup)
    summary = asyncio.run(measure(options, samples, progress=True)).summary
    found = summary.to_dict()
    if summary.failed:
        print(f"{server.peer}: {summary.failed} of {num_prompts} requests failed: {found['failures']}", flush=True)
        assert server.peer != "quire", found
    asked = (num_prompts - summary.failed) * OUTPUT
    if (made := summary.output_tokens) != asked:
        print(f"{server.peer} made {made} tokens, not {asked}: it does not heed ignore_eos")
    return found | {"start_seconds": server.start_seconds}


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return max(runs, key=lambda run: run["output_tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the peers are installed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--peers", nargs="+", default=list(SERVERS), choices=SERVERS)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peers}
    for repeat in range(args.repeats):
        print(f"repeat {repeat + 1} of {args.repeats}")
        for peer in args.peers:
            found = measure_peer(peer, args.folder, args.num_prompts, seed=repeat)
            print(f"{peer}: {found['output_tokens_per_s']:.1f} output tokens/s", flush=True)
            runs[peer].append(found)
    results = {
        peer: {"version": version(peer, args.folder), "best": best_of(peer_runs), "all": peer_runs}
        for peer, peer_runs in runs.items()
    }
    show(results)
    print(f"written to {write_results('server_peers', environment('quire', 'torch'), results)}")


def show(results: dict[str, dict[str, Any]]) -> None:
    title = f"{CONCURRENCY} at a time, {INPUT} in, {OUTPUT} out, the weights of smollm2"
    table = Table("server", "median TTFT, s", "median TPOT, ms", "output tokens/s", "ready after, s", title=title)
    for peer, row in results.items():
        best = row["best"]
        table.add_row(
            f"{peer} {row['version']}",
            f"{best['ttft_ms']['p50'] / 1000:.2f}",
            f"{best['tpot_ms']['p50']:.1f}",
            f"{best['output_tokens_per_s']:.1f}",
            f"{best['start_seconds']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
