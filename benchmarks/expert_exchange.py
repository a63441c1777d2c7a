"""Bytes that ranks receive for one layer of experts, by each `--all2all-backend`.

Run: python benchmarks/expert_exchange.py [--tokens 256] [--output benchmarks/results/expert_exchange.json]

Ranks are threads that are connected by TCP; what each connection has received is asked of the system (TCP_INFO), so
that the bytes are those that came and not those that a formula says. Experts of a token are sampled evenly, and
nothing is multiplied. allgather_reducescatter is measured for a step whose tokens every rank has: its sums are
scattered and gathered; with --tp-exact it is the results of each expert that are scattered. A step that ranks hold by
rows (sequence parallel) gathers its tokens first and leaves the sums scattered, which moves as much.
"""

from __future__ import annotations

import argparse
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from quire.bench.report import environment, write_report
from quire.kernels.cpu.experts import add_slots, expert_routes
from quire.parallel.shared_memory import CpuCollectives
from quire.parallel.sockets import Mesh

HIDDEN, EXPERTS = 1024, 64
_RECEIVED = 128  # where tcp_info of linux/tcp.h has tcpi_bytes_received


def received(mesh: Mesh, rank: int, size: int) -> int:
    total = 0
    for other in set(range(size)) - {rank}:
        info = mesh.socket_to(other).getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        total += struct.unpack_from("<Q", info, _RECEIVED)[0]
    return total


def bytes_of(size: int, work: Callable[[Mesh, int], object]) -> int:
    """What all ranks together receive while each does `work`."""
    meshes = [Mesh("127.0.0.1", b"of this benchmark alone", size) for _ in range(size)]
    addresses, barrier = [mesh.address for mesh in meshes], Barrier(size)

    def run(rank: int) -> int:
        mesh = meshes[rank]
        mesh.connect(rank, addresses, 0)
        before = received(mesh, rank, size)
        barrier.wait()
        work(mesh, rank)
        return received(mesh, rank, size) - before

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    for mesh in meshes:
        mesh.close()
    return sum(found)


def measure(tokens: int, size: int, top_k: int) -> dict[str, int]:
    generator = torch.Generator().manual_seed(size * top_k)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :top_k].to(torch.int32)
    places = torch.arange(EXPERTS, dtype=torch.int32).unsqueeze(1)
    there, back, everywhere = expert_routes(ids, places, EXPERTS // size, size)
    x, given, weights = torch.ones(tokens, HIDDEN), torch.ones(tokens, top_k, HIDDEN), torch.ones(tokens, top_k)

    def exchange(rows: Tensor, routes: Tensor) -> int:
        return bytes_of(size, lambda mesh, rank: mesh.of_all(rank).exchange(rows, routes))

    def add_up(mesh: Mesh, rank: int) -> Tensor:
        group = mesh.of_all(rank)
        assert isinstance(group, CpuCollectives)
        return group.add_slots(given, weights)

    parts = {
        "dispatch": exchange(x, there),
        "combine": exchange(given, back),
        "sums to all": exchange(add_slots(given, weights, 0, 1), everywhere),
    }
    return {
        "all-reduce": bytes_of(size, lambda mesh, rank: mesh.of_all(rank).all_reduce(x)),
        "all-reduce that gathers (formula)": size * (size - 1) * x.nbytes,
        "allgather_reducescatter": bytes_of(size, lambda mesh, rank: mesh.of_all(rank).sum_by_shares(x)),
        "allgather_reducescatter, exact": bytes_of(size, add_up),
        **parts,
        "all-to-all": sum(parts.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    print(f"MB that all ranks receive for {args.tokens} tokens of {HIDDEN} float32, {EXPERTS} experts")
    for size in (2, 4, 8):
        for top_k in (2, 8):
            found = measure(args.tokens, size, top_k)
            results.append({"ranks": size, "experts_of_a_token": top_k, "bytes": found})
            cells = "   ".join(f"{name} {count / 1e6:.2f}" for name, count in found.items())
            print(f"{size} ranks, top {top_k}:   {cells}")
    if args.output is not None:
        sizes = {"tokens": args.tokens, "hidden_size": HIDDEN, "experts": EXPERTS}
        write_report(args.output, environment(), results, sizes=sizes)


if __name__ == "__main__":
    main()
