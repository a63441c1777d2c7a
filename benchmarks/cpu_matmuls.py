"""Matmuls with packed weights at the default model's shapes, per format and number of rows, beside torch's float32.

Run: python benchmarks/cpu_matmuls.py [--threads 2] [--seconds 0.5] [--output benchmarks/results/cpu/matmuls.json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quire.bench.report import environment, write_report
from quire.kernels.cpu import library
from quire.kernels.cpu.matrix import Matmul, PackedMatrix

# [outputs, inner] of SmolLM2-135M: query-key-value, attention output, gate and up, down.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
LAYERS = 30  # so that one row reads more than a cache holds
ROWS = (1, 8, 32, 128, 1024)
FORMATS = ("int4", "int8", "bfloat16", "float16", "float32")
INTEGERS = ("int4", "int8")  # that rows of integers can be multiplied with

Call = Callable[[Tensor], Tensor]


def best_times(calls: list[Call], inputs: list[Tensor], seconds: float) -> float:
    """The sum of each call's least time, the calls made in turn for `seconds`."""
    least = [float("inf")] * len(calls)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or least[0] == float("inf"):
        for index, (call, x) in enumerate(zip(calls, inputs, strict=True)):
            begin = time.perf_counter()
            call(x)
            least[index] = min(least[index], time.perf_counter() - begin)
    return sum(least)


def measure(
    name: str, calls: list[Call], shapes: list[tuple[int, int]], num_bytes: int, seconds: float
) -> list[dict]:
    weights, results = sum(n * k for n, k in shapes), []
    for rows in ROWS:
        # Many rows do not depend on what the caches hold: one layer is enough.
        count = len(calls) if rows <= 32 else min(len(calls), len(SHAPES))
        share = sum(n * k for n, k in shapes[:count]) / weights
        inputs = [torch.randn(rows, k) for _, k in shapes[:count]]
        took = best_times(calls[:count], inputs, seconds)
        results.append(
            {
                "weights": name,
                "rows": rows,
                "milliseconds": took * 1e3,
                "gigabytes_per_second": num_bytes * share / took / 1e9,
                "gflops": 2 * weights * share * rows / took / 1e9,
            }
        )
        row = results[-1]
        print(
            f"{name:>20} {rows:>5} rows {row['milliseconds']:9.3f} ms"
            f" {row['gigabytes_per_second']:7.1f} GB/s {row['gflops']:7.1f} GFLOP/s",
            flush=True,
        )
    return results


def measure_torch(shapes: list[tuple[int, int]], seconds: float) -> list[dict]:
    weights = [torch.randn(shape) for shape in shapes]
    calls: list[Call] = [lambda x, weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
    return measure("torch float32", calls, shapes, sum(weight.nbytes for weight in weights), seconds)


def measure_packed(storage: str, name: str, shapes: list[tuple[int, int]], seconds: float) -> list[dict]:
    matrices = [PackedMatrix.from_float(torch.randn(shape), storage) for shape in shapes]
    num_bytes, results = sum(matrix.num_bytes for matrix in matrices), []
    for activations in ("float32", "int16") if storage in INTEGERS else ("float32",):
        calls: list[Call] = [Matmul([matrix], None, activations) for matrix in matrices]
        results += measure(f"{name} x {activations}", calls, shapes, num_bytes, seconds)
    return results


def call_overhead() -> float:
    """Seconds of a call whose matmul is too small to matter."""
    matmul = Matmul([PackedMatrix.from_float(torch.randn(16, 32))])
    return best_times([matmul], [torch.randn(1, 32)], 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row of the table")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    loaded = library.load()
    assert loaded is not None, "needs the native library"
    loaded.set_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"{loaded.instruction_set}, {options.threads} threads; a call costs {call_overhead() * 1e6:.2f} us")
    layers = list(SHAPES) * LAYERS
    results = []
    with torch.inference_mode():
        for storage in FORMATS:
            results += measure_packed(storage, storage, layers, options.seconds)
        results += measure_packed("int8", "int8 head", [HEAD], options.seconds)
        results += measure_torch(layers, options.seconds)
    if options.output:
        write_report(options.output, environment("torch"), results)


if __name__ == "__main__":
    main()
