"""How long processes take to sum over shared memory, whole and by rows, and to hand hidden states to one another.

Run: python benchmarks/collectives.py [--rounds 5000] [--ranks 2] [--output benchmarks/results/collectives.json]

Each runs with one thread. A round is one call that has returned; by rows it is a reduce-scatter and an all-gather, as
sequence parallel steps have them. The link's, of the first two processes, is a message there and one back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quire.bench.report import environment, write_report
from quire.kernels.cpu.library import load
from quire.parallel.shared_memory import (
    LINK_BYTES,
    SharedMemory,
    SharedMemoryCollectives,
    SharedMemoryLink,
    collective_bytes,
)

SIZES = (4 << 10, 64 << 10, 1 << 20)
WIDE = (1 << 20, 8 << 20)  # of prompts
ROW = 8 << 10  # bytes of a token
WARM_UP = 20


def rounds_of(work: Callable[[], object], count: int) -> list[float]:
    times = []
    for index in range(WARM_UP + count):
        begin = time.perf_counter()
        work()
        if index >= WARM_UP:
            times.append((time.perf_counter() - begin) * 1e6)
    return times


def exchange(link: SharedMemoryLink, rank: int, x: torch.Tensor) -> None:
    """From the first to the second, and back."""
    if rank == 0:
        link.send(x)
    link.receive(x)
    if rank == 1:
        link.send(x)


def by_rows(group: SharedMemoryCollectives, x: torch.Tensor) -> None:
    group.gather_rows(group.reduce_scatter(x), x.shape[0])


def measure(
    count: int, ranks: int, rank: int, sums: SharedMemory, there: SharedMemory, back: SharedMemory
) -> dict[str, list[float]]:
    """Microseconds of every round, by what was done."""
    library = load()
    assert library is not None, "the CPU kernels could not be built"
    library.set_threads(1)
    group = SharedMemoryCollectives(sums, rank, ranks)
    found = {}
    for size in sorted({*SIZES, *WIDE}):
        x, rounds = torch.ones(1, size // 4), max(50, min(count, count * (256 << 10) // size))
        found[f"sum of {size >> 10} KB"] = rounds_of(partial(group.all_reduce, x), rounds)
        if size in WIDE:
            rows = x.view(-1, ROW // 4)
            found[f"sum of {size >> 10} KB by rows"] = rounds_of(partial(by_rows, group, rows), rounds)
    ends = [part.part(0, LINK_BYTES) for part in (there, back)]
    link = SharedMemoryLink(*(ends[::-1] if rank == 0 else ends))
    for size in SIZES if rank < 2 else ():
        x = torch.ones(1, size // 4)
        found[f"there and back of {size >> 10} KB"] = rounds_of(partial(exchange, link, rank, x), count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    memories = SharedMemory(collective_bytes(args.ranks)), SharedMemory(LINK_BYTES), SharedMemory(LINK_BYTES)
    torch.set_num_threads(1)
    load()
    children = []
    for rank in range(1, args.ranks):
        children.append(os.fork())
        if children[-1] == 0:
            measure(args.rounds, args.ranks, rank, *memories)
            os._exit(0)
    found = measure(args.rounds, args.ranks, 0, *memories)
    for child in children:
        os.waitpid(child, 0)
    results = {
        name: {"median_us": statistics.median(times), "p90_us": statistics.quantiles(times, n=10)[-1]}
        for name, times in found.items()
    }
    for name, row in results.items():
        print(f"{name:<24} median {row['median_us']:8.1f} us   p90 {row['p90_us']:8.1f} us")
    if args.output is not None:
        write_report(args.output, environment(), results)


if __name__ == "__main__":
    main()
