"""How long two processes take to sum 64 KB over shared memory, and to hand hidden states from one to the other.

Run: python benchmarks/collectives.py [--rounds 5000] [--output benchmarks/results/collectives.json]

Both run with one thread each. A round is one call that has returned; the link's is a message there and one back.
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
WARM_UP = 200


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


def measure(count: int, rank: int, sums: SharedMemory, there: SharedMemory, back: SharedMemory) -> list[list[float]]:
    """Microseconds of every round: of sums of each size, then of messages there and back."""
    library = load()
    assert library is not None, "the CPU kernels could not be built"
    library.set_threads(1)
    group = SharedMemoryCollectives(sums, rank, 2)
    ends = [part.part(0, LINK_BYTES) for part in (there, back)]
    link = SharedMemoryLink(*(ends[::-1] if rank == 0 else ends))
    messages = [torch.ones(1, size // 4) for size in SIZES]
    found = [rounds_of(partial(group.all_reduce, x), count) for x in messages]
    return found + [rounds_of(partial(exchange, link, rank, x), count) for x in messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    memories = SharedMemory(collective_bytes(2)), SharedMemory(LINK_BYTES), SharedMemory(LINK_BYTES)
    torch.set_num_threads(1)
    load()
    child = os.fork()
    found = measure(args.rounds, int(child == 0), *memories)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    names = [f"{what} of {size >> 10} KB" for what in ("sum", "there and back") for size in SIZES]
    results = {
        name: {"median_us": statistics.median(times), "p90_us": statistics.quantiles(times, n=10)[-1]}
        for name, times in zip(names, found, strict=True)
    }
    for name, row in results.items():
        print(f"{name:<24} median {row['median_us']:8.1f} us   p90 {row['p90_us']:8.1f} us")
    if args.output is not None:
        write_report(args.output, environment(), results)


if __name__ == "__main__":
    main()
