"""Bytes and time of the end of a tensor parallel step: all logits gathered on each rank, or candidates exchanged.

Run: python benchmarks/sharded_sampling.py [--ranks 2] [--rounds 60] [--output FILE]

Ranks are processes on this machine's CPU with one thread each. Head and sampler are those of an engine, the head's
matrix is made up; a round is the head's matmul over a rank's slice of the vocabulary, the exchange, and the choice of
a token for each row. Both ways alternate, round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from quire.bench.report import environment, write_report
from quire.kernels.cpu.library import load
from quire.layers.embedding import HeadProjection, LMHead
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.parallel.shared_memory import SharedMemory, SharedMemoryCollectives, collective_bytes
from quire.runner.request_rows import RequestRows
from quire.runner.sampling.sampler import Sampler
from quire.runner.sampling.sharded import VocabShard
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart

VOCAB, HIDDEN = 128_256, 512
ROWS = (1, 8, 32)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
}
WARM_UP = 5


def make_head(group: ParallelGroup) -> LMHead:
    target = Target()
    projection = HeadProjection(HIDDEN, VOCAB, bias=False, target=target, group=group).allocate()
    projection.load("weight", None, torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)) / 8)
    projection.finish()
    return LMHead(projection, logit_divisor=None, logit_soft_cap=None, target=target, group=group)


def measure(rank: int, ranks: int, rounds: int, memory: SharedMemory) -> dict[str, dict[str, float]]:
    library = load()
    assert library is not None, "the CPU kernels could not be built"
    library.set_threads(1)
    links = SharedMemoryCollectives(memory, rank, ranks)
    group = ParallelGroup(rank, ranks, links)
    head, shard = make_head(group), VocabShard(group.share_of(VOCAB, "vocabulary")[0], ranks, links)
    results = {}
    for name, params in KINDS.items():
        for count in ROWS:
            state = RequestRows(count, 64, torch.device("cpu"))
            sampler = Sampler(VOCAB, count, torch.device("cpu"), shard=shard)
            for row in range(count):
                start = RowStart(row, str(row), [1, 2], 2, 0, SamplingParams(**params), seed=row, eos_token_ids=())
                sampler.add_request(row, start)
            sampler.apply_staged_writes()
            kind = sampler.kind(list(range(count)), False)
            ways = {"gathered": kind._replace(candidates=0), "candidates": kind}
            hidden = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))
            times: dict[str, list[float]] = {way: [] for way in ways}
            tokens: dict[str, list[int]] = {}
            for _ in range(WARM_UP + rounds):
                for way, of_way in ways.items():
                    state.num_tokens.fill_(2)
                    links.minimum([0])  # ranks begin together
                    begin = time.perf_counter()
                    logits = head(hidden, not of_way.candidates)
                    out = sampler.sample(of_way, logits, torch.arange(count), state)
                    times[way].append(time.perf_counter() - begin)
                    tokens[way] = out[:, 0].tolist()
            assert tokens["gathered"] == tokens["candidates"], "both choose the same tokens"
            moved = {"gathered": 4 * -(-VOCAB // ranks), "candidates": 4 * (1 + 2 * kind.candidates)}
            results[f"{name}, {count} rows"] = {
                **{f"{way}_bytes_from_each_rank": count * moved[way] for way in ways},
                **{f"{way}_best_ms": 1e3 * min(times[way][WARM_UP:]) for way in ways},
                **{f"{way}_median_ms": 1e3 * statistics.median(times[way][WARM_UP:]) for way in ways},
            }
    return results


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    memory = SharedMemory(collective_bytes(args.ranks))
    torch.set_num_threads(1)
    load()
    children, rank = [], 0
    for other in range(1, args.ranks):
        child = os.fork()
        if child == 0:
            rank = other
            break
        children.append(child)
    found = measure(rank, args.ranks, args.rounds, memory)
    if rank:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    for name, row in found.items():
        told = [
            f"{what} {row[f'gathered_{key}']:12,.2f} -> {row[f'candidates_{key}']:9,.2f}"
            for what, key in (("bytes", "bytes_from_each_rank"), ("best ms", "best_ms"), ("median ms", "median_ms"))
        ]
        print(f"{name:<22} {'   '.join(told)}")
    if args.output is not None:
        write_report(args.output, environment("torch"), {"ranks": args.ranks, "steps": found}, note=args.note)


if __name__ == "__main__":
    main()
