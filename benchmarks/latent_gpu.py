"""Latent attention on a GPU, kernel by kernel: ways to cut attention over latents, and the matmuls of heads.

    python benchmarks/latent_gpu.py [--parts cuts heads] [--cases 256x1100 16x16000] [--processes 12]

`cuts`: microseconds of attention over latents in a CUDA graph over different layers, for each way to cut it, beside
the bytes over 4.3 TB/s. `heads`: the same of a matrix for each head. Kernels are compiled by several processes first.
benchmarks/gpu_profile.py shows the kernels of whole steps, and benchmarks/gpu.py measures the rows of the table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from quire.kernels.triton.latent import per_head
from quire.kernels.triton.latent_attention import LatentCut, latent_attention

BANDWIDTH = 4.3e12  # bytes/s that copies reach
HEADS, RANK, ROPE, NOPE, BLOCK = 16, 512, 64, 128, 16
LAYERS = 8  # caches that a graph goes through, so that none is in the L2 cache
CASES = {"1x288": (4, 8), "16x1100": (8, 16), "64x1100": (2, 4), "256x1100": (0, 2), "16x16000": (8, 16, 32)}
# (lines of a tile, keys at a time, warps, stages)
SHAPES = [
    (16, 32, 4, 3),
    (16, 32, 4, 2),
    (16, 32, 8, 2),
    (16, 64, 8, 2),
    (64, 32, 8, 3),
    (64, 32, 8, 2),
    (64, 64, 8, 2),
]


def time_graph(run: Callable[[], None]) -> float:
    """Microseconds of what `run` launches."""
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
    return float(begin.elapsed_time(end)) * 1e3 / 10


def cut_runner(rows: int, context: int, layers: int) -> Callable[[LatentCut], None]:
    """A function that launches attention of single queries over the caches of some layers, cut in a given way."""
    blocks = -(-context // BLOCK)
    tables = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device="cuda").view(rows, blocks)
    shape = (rows * blocks + 1, BLOCK, RANK + ROPE)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    q = torch.randn(rows, HEADS, RANK + ROPE, device="cuda").to(torch.bfloat16)
    out = torch.empty(rows, HEADS, RANK, dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    contexts, zeros, lines = torch.full_like(starts[1:], context), torch.zeros_like(starts[1:]), starts[:-1].long()

    def run(cut: LatentCut) -> None:
        for cache in caches:
            latent_attention(q, cache, tables, lines, contexts, starts, starts[:-1], zeros, out, 0.07, cut)

    return run


def cuts(case: str) -> list[tuple[str, LatentCut]]:
    return [
        (f"{splits} splits, {lines} lines, {keys} keys, {warps} warps, {stages} stages",
         replace(LatentCut(1, splits), min_lines=lines, keys=keys, num_warps=warps, num_stages=stages))
        for splits in CASES[case] for lines, keys, warps, stages in SHAPES
    ]  # fmt: skip


def show_cuts(case: str) -> None:
    rows, context = (int(part) for part in case.split("x"))
    run = cut_runner(rows, context, LAYERS)
    floor = rows * context * (RANK + ROPE) * 2 / BANDWIDTH * 1e6
    print(f"\n{rows} rows of context {context}: floor {floor:.1f} us")
    found = []
    for name, cut in cuts(case):
        try:
            found.append((time_graph(partial(run, cut)) / LAYERS, name))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:80]}")
    for us, name in sorted(found):
        print(f"{us:9.1f} us  {name}", flush=True)


def heads_runner(inner: int, outputs: int, tokens: int, at_once: int) -> Callable[[], None]:
    """A function that launches matmuls of heads with the matrices of some layers; at_once 0: torch's."""
    x = torch.randn(tokens, HEADS, inner, device="cuda").to(torch.bfloat16)
    weights = [torch.randn(HEADS, inner, outputs, device="cuda").to(torch.bfloat16) for _ in range(LAYERS)]

    def run() -> None:
        for weight in weights:
            if at_once:
                per_head(x, weight, at_once)
            else:
                torch.bmm(x.transpose(0, 1), weight)

    return run


def show_heads() -> None:
    """Absorbing queries and projecting values up, for each tile of tokens, beside torch's batched matmul (0)."""
    for tokens in (1, 16, 64, 256):
        for inner, outputs in ((NOPE, RANK), (RANK, NOPE)):
            floor = 2 * HEADS * (inner * outputs + tokens * (inner + outputs)) / BANDWIDTH * 1e6
            times = {n: time_graph(heads_runner(inner, outputs, tokens, n)) / LAYERS for n in (16, 32, 64, 128, 0)}
            found = ", ".join(f"{n}: {us:.1f}" for n, us in times.items())
            print(f"{tokens:4} tokens, {inner} -> {outputs}: floor {floor:.1f} us; at once {found}", flush=True)


def compile_cuts(cases: list[str], part: int, parts: int) -> None:
    """Launch each part-th of the ways once, which leaves its kernel in Triton's cache."""
    for case in cases:
        rows, context = (int(number) for number in case.split("x"))
        run = cut_runner(rows, context, 1)
        for _, cut in cuts(case)[part::parts]:
            try:
                run(cut)
            except Exception:
                continue  # it will be named when it is timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["cuts", "heads"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--processes", type=int, default=12, help="that compile kernels")
    parser.add_argument("--compile", type=int, help="only compile this part of the kernels")
    args = parser.parse_args()
    if args.compile is not None:
        compile_cuts(args.cases, args.compile, args.processes)
        return
    if "cuts" in args.parts:
        command = [sys.executable, __file__, "--cases", *args.cases, "--processes", str(args.processes), "--compile"]
        compilers = [subprocess.Popen([*command, str(part)]) for part in range(args.processes)]
        for compiler in compilers:
            compiler.wait()
        for case in args.cases:
            show_cuts(case)
    if "heads" in args.parts:
        show_heads()


if __name__ == "__main__":
    main()
