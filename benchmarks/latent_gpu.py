"""Latent attention on a GPU, piece by piece: cuts of its kernel, kernels of a decode step, decode rows.

    python benchmarks/latent_gpu.py [--parts cuts profile rows] [--model deepseek-v2-lite] [--batches 1 256]

`cuts`: microseconds of attention over latents in a CUDA graph over different layers, for each way to cut it, beside
the bytes over 4.3 TB/s. `profile`: kernels of a decode step by their time, from torch's profiler over replayed steps.
`rows`: what benchmarks/gpu.py measures of these batches. The routing of experts is forced to be uniform.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from itertools import product

import torch
from gpu import Bench

from quire.kernels.triton.latent_attention import LatentCut, latent_attention

BANDWIDTH = 4.3e12  # bytes/s that copies reach
HEADS, RANK, ROPE, BLOCK = 16, 512, 64, 16
LAYERS = 8  # caches that a graph goes through, so that none is in the L2 cache
CASES = [(1, 288), (16, 1100), (64, 1100), (256, 1100), (16, 16000)]


def time_cut(rows: int, context: int, cut: LatentCut) -> float:
    """Microseconds of a launch, or of two where segments are added up."""
    blocks = -(-context // BLOCK)
    tables = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device="cuda").view(rows, blocks)
    caches = [
        torch.randn(rows * blocks + 1, BLOCK, RANK + ROPE, device="cuda").to(torch.bfloat16) for _ in range(LAYERS)
    ]
    q = torch.randn(rows, HEADS, RANK + ROPE, device="cuda").to(torch.bfloat16)
    out = torch.empty(rows, HEADS, RANK, dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    contexts, zeros, lines = torch.full_like(starts[1:], context), torch.zeros_like(starts[1:]), starts[:-1].long()

    def run() -> None:
        for cache in caches:
            latent_attention(q, cache, tables, lines, contexts, starts, starts[:-1], zeros, out, 0.07, cut)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (10 * LAYERS)


def show_cuts() -> None:
    print(f"{'rows':>5} {'context':>8} {'floor us':>9}   splits/lines/keys: us")
    for rows, context in CASES:
        floor = rows * context * (RANK + ROPE) * 2 / BANDWIDTH * 1e6
        found = []
        splits = [s for s in (0, 2, 4, 8, 16, 32) if rows * max(1, s) <= 1024 and s * 64 <= context]
        for split, lines, keys in product(splits, (16, 64), (32, 64)):
            if rows * max(1, split) < 32:  # no way to fill the device
                continue
            cut = replace(LatentCut(1, split), min_lines=lines, keys=keys)
            try:
                found.append((time_cut(rows, context, cut), f"{split}/{lines}/{keys}"))
            except Exception as error:
                print(f"{split}/{lines}/{keys}: {type(error).__name__}: {str(error)[:80]}")
        best = "  ".join(f"{name}: {us:.1f}" for us, name in sorted(found))
        print(f"{rows:5} {context:8} {floor:9.1f}   {best}", flush=True)


def show_profile(bench: Bench, batch: int, steps: int = 16) -> None:
    """Kernels of a decode step, in microseconds and launches of a step."""
    length = 32 if batch == 1 else 1024
    prompts = [bench.prompt(length) for _ in range(batch)]
    bench.run(prompts, [8] * batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as without:
        bench.run(prompts, [1] * batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as decoded:
        bench.run(prompts, [1 + steps] * batch)
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for profile, sign in ((decoded, 1), (without, -1)):
        for event in profile.events():
            times[event.name] += sign * event.device_time / steps
            counts[event.name] += sign / steps
    total, launches = sum(times.values()), sum(counts.values())
    print(f"\nbatch {batch}: {total:.0f} us in {launches:.0f} kernels of a step")
    for name, us in sorted(times.items(), key=lambda item: -item[1])[:28]:
        print(f"{us:9.1f} us {counts[name]:7.1f} x {us / max(counts[name], 1e-9):7.2f}  {name[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["cuts", "profile", "rows"])
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 256])
    args = parser.parse_args()
    if "cuts" in args.parts:
        show_cuts()
    if {"profile", "rows"} & set(args.parts):
        bench = Bench(args.model)
        print(f"ready in {bench.ready:.1f} s", flush=True)
        for batch in args.batches:
            if "profile" in args.parts:
                show_profile(bench, batch)
            if "rows" in args.parts and batch == 1:
                print(f"decode batch 1, ms: {bench.decode_one():.3f}", flush=True)
            elif "rows" in args.parts:
                print(f"decode batch {batch}, tok/s: {bench.decode_batch(batch):.0f}", flush=True)
        bench.client.shutdown()


if __name__ == "__main__":
    main()
