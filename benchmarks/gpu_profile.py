"""Kernels of a decode step or of a prompt on a GPU, by the time that each adds.

    python benchmarks/gpu_profile.py [--model deepseek-v2-lite] [--batches 1 256] [--prompts 8192] [--rows]

With dependent launches a kernel starts while the one before it still runs, and waits; its duration then has that
wait in it. So a kernel counts from the end of the kernel before it, or from its own start if that is later, and the
times add up to what the device was busy. `--rows`: also what benchmarks/gpu.py measures of these batches and prompts.
The routing of experts is forced to be uniform.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from gpu import SHAPES, Bench


def added_times(events: Any) -> tuple[dict[str, float], dict[str, int]]:
    """(microseconds that each kernel adds, launches of each) of a profile's events."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    until = 0.0
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    for event in sorted(kernels, key=lambda event: event.time_range.end):
        times[event.name] += max(0.0, event.time_range.end - max(event.time_range.start, until))
        counts[event.name] += 1
        until = max(until, event.time_range.end)
    return times, counts


def profile(bench: Bench, prompts: list[list[int]], outputs: int) -> tuple[dict[str, float], dict[str, int]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        bench.run(prompts, [outputs] * len(prompts))
    return added_times(found.events())


def show(title: str, times: dict[str, float], counts: dict[str, float], most: int) -> None:
    print(f"\n{title}: {sum(times.values()):.0f} us in {sum(counts.values()):.0f} kernels")
    for name, us in sorted(times.items(), key=lambda item: -item[1])[:most]:
        print(f"{us:9.1f} us {counts[name]:7.1f} x {us / max(counts[name], 1e-9):7.2f}  {name[:90]}", flush=True)


def show_decode(bench: Bench, batch: int, most: int, steps: int = 16) -> None:
    prompts = [bench.prompt(32 if batch == 1 else 1024) for _ in range(batch)]
    bench.run(prompts, [8] * batch)  # their blocks are cached from here on, so that prompts cost little
    with_steps, without = profile(bench, prompts, 1 + steps), profile(bench, prompts, 1)
    times, counts = (
        {k: (v - without[part].get(k, 0)) / steps for k, v in with_steps[part].items()} for part in (0, 1)
    )
    show(f"{bench.model}, decode step of batch {batch}", times, counts, most)


def show_prompt(bench: Bench, length: int, most: int) -> None:
    bench.run([bench.prompt(length)], [1])
    times, counts = profile(bench, [bench.prompt(length)], 1)
    show(f"{bench.model}, prompt of {length}", times, dict(counts), most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v2-lite", choices=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 256])
    parser.add_argument("--prompts", nargs="*", type=int, default=[])
    parser.add_argument("--kernels", type=int, default=24, help="how many to print")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--most-experts", type=int, help="that tokens of a layer are routed to")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rows", action="store_true")
    args = parser.parse_args()
    settings = {"deterministic": args.deterministic, "kv_cache_dtype": args.kv_cache_dtype}
    bench = Bench(args.model, most_experts=args.most_experts, **settings)
    print(f"ready in {bench.ready:.1f} s", flush=True)
    for batch in args.batches:
        show_decode(bench, batch, args.kernels)
        if args.rows and batch == 1:
            print(f"decode batch 1, ms: {bench.decode_one():.3f}", flush=True)
        elif args.rows:
            print(f"decode batch {batch}, tok/s: {bench.decode_batch(batch):.0f}", flush=True)
    for length in args.prompts:
        show_prompt(bench, length, args.kernels)
        if args.rows:
            print(f"prefill of {length}, ms: {bench.prefill(length):.1f}", flush=True)
    bench.client.shutdown()


if __name__ == "__main__":
    main()
