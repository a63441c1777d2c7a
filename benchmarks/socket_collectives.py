"""How long two processes take to sum over TCP: plain, as on one host, and encrypted, as between hosts.

Run: python benchmarks/socket_collectives.py [--rounds 500] [--output benchmarks/results/socket_collectives.json]

Both processes are on this machine and have one thread each; ways and sizes alternate, and the best of three medians
counts. Between real hosts the wire's time comes on top, and encrypting has the other host's cores.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from functools import partial
from pathlib import Path

import torch

from benchmarks.collectives import SIZES, rounds_of
from quire.bench.report import environment, write_report
from quire.kernels.cpu.library import load
from quire.parallel.sockets import Mesh

WAYS = {"plain": "127.0.0.1", "TLS": "127.0.0.2"}  # the second rank's host; the first's is 127.0.0.1
SECRET = b"of this benchmark alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = load()
    assert library is not None, "the CPU kernels could not be built"
    library.set_threads(1)
    ours, theirs = socket.socketpair()
    rank = int(os.fork() == 0)
    talk = theirs if rank else ours
    groups = {}
    for way, host in WAYS.items():
        mesh = Mesh(host if rank else "127.0.0.1", SECRET, 2)
        talk.sendall(mesh.address.ljust(32).encode())
        other = talk.recv(32).decode().strip()
        mesh.connect(rank, [other, mesh.address] if rank else [mesh.address, other], 0)
        groups[way] = mesh.of_all(rank)
    results: dict[str, float] = {}
    for _ in range(3):
        for size in SIZES:
            for way, group in groups.items():
                x = torch.ones(1, size // 4)
                median = statistics.median(rounds_of(partial(group.all_reduce, x), args.rounds))
                name = f"{way}, {size >> 10} KB"
                results[name] = min(median, results.get(name, median))
    if rank:
        os._exit(0)
    os.wait()
    for name, median in results.items():
        print(f"{name:<16} median {median:8.1f} us")
    if args.output is not None:
        write_report(args.output, environment(), {name: {"median_us": each} for name, each in results.items()})


if __name__ == "__main__":
    main()
