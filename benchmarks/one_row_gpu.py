"""Matmuls of one row and recurrences of few tokens on a GPU: microseconds for each way to cut them.

    python benchmarks/one_row_gpu.py [--parts dense experts recurrence]

Each is timed in a CUDA graph over several layers, so that nothing is in the L2 cache, beside bytes / 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from latent_gpu import BANDWIDTH, time_graph
from torch import Tensor

from quire.kernels.triton import states
from quire.kernels.triton.grouped_matmul import SharedLines, grouped_one_row
from quire.kernels.triton.matmul import matmul_one_row
from quire.ops.states import StatePlaces, StateShape

PROCESSES = 12  # that compile kernels first
COMPILE = None if (part := os.environ.get("COMPILE_PART")) is None else int(part)
LAYERS = 8 if COMPILE is None else 1
DENSE = {"queries and latent": (3648, 2048), "output": (2048, 2048), "gated delta in": (12352, 2048)}
DENSE |= {"gated delta out": (2048, 4096)}
# (experts, chosen, width of an expert, width of the shared ones)
EXPERTS = {"deepseek-v2-lite": (64, 6, 1408, 2816), "qwen3-next": (512, 10, 512, 512)}
HIDDEN = 2048


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def show(title: str, num_bytes: float, ways: dict[str, Callable[[], None]], layers: int = LAYERS) -> None:
    """num_bytes: that one layer reads; `layers`: that a way computes one after the other."""
    if COMPILE is not None:  # each kernel once, which leaves it in Triton's cache
        for run in list(ways.values())[COMPILE::PROCESSES]:
            run()
        return
    found = sorted((time_graph(run) / layers, name) for name, run in ways.items())
    print(
        f"{title}: floor {num_bytes / BANDWIDTH * 1e6:.1f} us; " + ", ".join(f"{n}: {us:.1f}" for us, n in found[:8])
    )
    print(f"    worst {found[-1][0]:.1f} us ({found[-1][1]})", flush=True)


def dense() -> None:
    for name, (n, k) in DENSE.items():
        x, weights = bf16(1, k), [bf16(n, k) for _ in range(LAYERS)]
        cuts = product((1, 2, 4), (512, 1024, 2048), (4, 8))
        show(name, weights[0].nbytes, {str(cut): partial(run_dense, x, weights, cut) for cut in cuts})


def run_dense(x: Tensor, weights: list[Tensor], cut: tuple[int, int, int]) -> None:
    for weight in weights:
        matmul_one_row(x, weight, None, *cut)


def experts() -> None:
    for name, (count, top, width, shared_width) in EXPERTS.items():
        for part, (n, k, shared_n, shared_k) in {
            "gate and up": (2 * width, HIDDEN, 2 * shared_width, HIDDEN),
            "down": (HIDDEN, width, HIDDEN, shared_width),
        }.items():
            layers = min(LAYERS, 4)
            weights = [bf16(count, n, k) for _ in range(layers)]
            beside = [bf16(shared_n, shared_k) for _ in range(layers)]
            rows = 1 if part == "gate and up" else top
            x, shared_x = bf16(rows, k), bf16(1, shared_k)
            ids = torch.randperm(count, device="cuda")[:top].int().view(1, top)
            activation = "silu" if part == "gate and up" else ""
            chosen = torch.rand(1, top, device="cuda") if not activation else None
            outputs = shared_n // 2 if activation else shared_n

            routed = partial(run_experts, x, ids, top if rows == 1 else 1, activation, chosen)
            layered = partial(routed, list(zip(weights, beside, strict=True)), shared_x, outputs)
            num_bytes = 2 * (top * n * k + shared_n * shared_k)
            cuts = product((4, 8, 16), (256, 512, 1024), (4, 8))
            show(f"{name}, {part}", num_bytes, {str(cut): partial(layered, cut) for cut in cuts}, layers)


def run_experts(
    x: Tensor,
    ids: Tensor,
    per_row: int,
    activation: str,
    chosen: Tensor | None,
    layers: list[tuple[Tensor, Tensor]],  # experts, the shared one beside them
    shared_x: Tensor,
    outputs: int,
    cut: tuple[int, int, int],
) -> None:
    for weight, shared in layers:
        beside = SharedLines(shared_x, shared, torch.empty(1, outputs, device="cuda").bfloat16())
        grouped_one_row(x, ids, weight, None, per_row, activation, *cut, weights=chosen, shared=beside)


def recurrence() -> None:
    shape = StateShape(0, 1, 32, 16, 128, 128)
    for rows in (1, 64):
        caches = [torch.randn(rows + 1, shape.size, device="cuda") for _ in range(LAYERS)]
        for cache in caches:
            cache[:, 0] = 99.0  # each state's ring has one token
        tables = torch.arange(1, rows + 1, device="cuda", dtype=torch.int32)[:, None].expand(rows, 16).contiguous()
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        contexts = torch.full((rows,), 101, dtype=torch.int32, device="cuda")
        places = StatePlaces(tables, torch.arange(rows, device="cuda"), contexts, starts, 16)
        given = (bf16(rows, 8192), bf16(rows, 32), bf16(rows, 32))
        vectors = -torch.rand(32, device="cuda"), torch.rand(32, device="cuda")
        inputs = states.delta_inputs(*given, *vectors, shape)

        fold = [partial(states.fold_tokens, inputs, cache, places, shape, torch.bfloat16) for cache in caches]
        cuts = product((16, 32, 64, 128), (2, 4, 8))
        ways = {str(cut): partial(run_all, fold, cut) for cut in cuts}
        show(f"recurrence of {rows} rows", 2 * rows * shape.matrix_size * 4, ways)


def run_all(fold: list[partial[None]], cut: tuple[int, int]) -> None:
    for one in fold:
        one(cut=cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["dense", "experts", "recurrence"])
    args = parser.parse_args()
    if COMPILE is None:
        command, environment = [sys.executable, *sys.argv], dict(os.environ)
        parts = [environment | {"COMPILE_PART": str(part)} for part in range(PROCESSES)]
        for compiler in [subprocess.Popen(command, env=each) for each in parts]:
            compiler.wait()
    for part in args.parts:
        {"dense": dense, "experts": experts, "recurrence": recurrence}[part]()


if __name__ == "__main__":
    main()
