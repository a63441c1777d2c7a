"""The CPU kernels between the matmuls, at the default model's shapes; beside those of another build of the library.

Run: python benchmarks/cpu_kernels.py [--before LIBRARY.so] [--threads 2] [--seconds 0.3] [--only TEXT]
         [--output RESULT.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from quire.bench.report import environment, write_report
from quire.kernels.cpu import library

HEADS, KV_HEADS, DIM, HIDDEN, MLP, VOCAB = 9, 3, 64, 576, 1536, 49152  # SmolLM2-135M
LAYERS = 30  # so that a decode reads its keys from memory, as it does in the model
BLOCK, FLOAT16 = 16, 1

Call = Callable[[SimpleNamespace], None]  # of the kernels of one library


def gated(rows: int) -> Call:
    x, out = torch.randn(rows, 2 * MLP), torch.empty(rows, MLP)
    return lambda kernels: kernels.gated(x.data_ptr(), out.data_ptr(), rows, MLP, 0)


def add_rms_norm(rows: int) -> Call:
    x, residual, weight = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), torch.randn(HIDDEN)
    out, total = torch.empty(rows, HIDDEN), torch.empty(rows, HIDDEN)
    pointers = [tensor.data_ptr() for tensor in (x, residual, weight, out, total)]

    def call(kernels: SimpleNamespace, keep: object = (x, residual, weight, out, total)) -> None:
        kernels.add_rms_norm(*pointers, rows, HIDDEN, HIDDEN, 1e-5, 0.0)

    return call


def first_max(rows: int) -> Call:
    scores, ids, best = torch.randn(rows, VOCAB), torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    return lambda kernels: kernels.first_max(scores.data_ptr(), rows, VOCAB, VOCAB, ids.data_ptr(), best.data_ptr())


class Sequences:
    """`count` sequences with `context` tokens in the cache, of which the last `new` are this step's."""

    def __init__(self, count: int, context: int, new: int, layers: int) -> None:
        self.count, self.tokens = count, count * new
        blocks = -(-context // BLOCK)
        # Blocks as a server hands them out: in turn to all sequences.
        self.tables = (1 + torch.arange(count * blocks).view(blocks, count).t()).to(torch.int32).contiguous()
        self.caches = torch.randn(layers, 2, 1 + count * blocks, KV_HEADS, BLOCK, DIM).to(torch.float16)
        self.value_offset = self.caches[0, 0].nbytes
        self.rows = torch.arange(count)
        self.contexts = torch.full((count,), context, dtype=torch.int32)
        self.starts = torch.arange(0, self.tokens + 1, new, dtype=torch.int32)
        positions = torch.arange(context - new, context)
        slots = self.tables[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
        self.slots = slots.flatten().contiguous()
        self.q = torch.randn(self.tokens, HEADS, DIM)
        self.out = torch.empty_like(self.q)
        self.qkv = torch.randn(self.tokens, HEADS + 2 * KV_HEADS, DIM)
        self.cos, self.sin = torch.rand(self.tokens, DIM), torch.rand(self.tokens, DIM)
        self._layer = 0

    def _cache(self) -> int:
        self._layer = (self._layer + 1) % self.caches.shape[0]
        return self.caches[self._layer].data_ptr()

    def attention(self, kernels: SimpleNamespace) -> None:
        tensors = (self.tables, self.rows, self.contexts, self.starts, self.out)
        kernels.attention(
            *(self.q.data_ptr(), self._cache(), *(tensor.data_ptr() for tensor in tensors)),
            *(self.count, self.tables.shape[1], self.value_offset, HEADS, KV_HEADS, DIM, BLOCK),
            *(0, 1, FLOAT16, DIM**-0.5, 0.0, None, 1, 0),
        )

    def prepare_qkv(self, kernels: SimpleNamespace) -> None:
        tensors = (self.cos, self.sin, self.slots, self.out)
        kernels.prepare_qkv(
            *(self.qkv.data_ptr(), None, None, *(tensor.data_ptr() for tensor in tensors), self._cache()),
            *(self.tokens, self.tokens, HEADS, KV_HEADS, DIM, DIM, BLOCK, self.value_offset, FLOAT16, 0.0, 0.0),
        )


def cases() -> dict[str, Callable[[], Call]]:
    found: dict[str, Callable[[], Call]] = {
        "attention, a prompt of 128": lambda: Sequences(1, 128, 128, 4).attention,
        "attention, a prompt of 512": lambda: Sequences(1, 512, 512, 2).attention,
        "attention, the second 512 of 1,024": lambda: Sequences(1, 1024, 512, 2).attention,
        "attention, 40 more of 6,000": lambda: Sequences(1, 6040, 40, 8).attention,
        "attention, 512 more of 6,000": lambda: Sequences(1, 6512, 512, 2).attention,
        "attention, 4 prompts of 128": lambda: Sequences(4, 128, 128, 2).attention,
        "attention, 32 prompts of 16": lambda: Sequences(32, 16, 16, 2).attention,
        "attention, 32 decodes over 192": lambda: Sequences(32, 192, 1, LAYERS).attention,
        "attention, a decode over 100": lambda: Sequences(1, 100, 1, LAYERS).attention,
        "attention, a decode over 1,024": lambda: Sequences(1, 1024, 1, LAYERS).attention,
        "prepare_qkv, 32 decodes": lambda: Sequences(32, 192, 1, LAYERS).prepare_qkv,
        "prepare_qkv, a prompt of 128": lambda: Sequences(1, 128, 128, 4).prepare_qkv,
        "prepare_qkv, a prompt of 512": lambda: Sequences(1, 512, 512, 2).prepare_qkv,
    }
    for rows in (1, 32, 128, 512):
        found[f"gated, {rows} rows"] = lambda rows=rows: gated(rows)
        found[f"add_rms_norm, {rows} rows"] = lambda rows=rows: add_rms_norm(rows)
    found["first_max, 32 rows"] = lambda: first_max(32)
    return found


def measure(call: Call, libraries: dict[str, library.Library], seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of a call with each library, in turns of many calls: threads spin for a moment after each."""
    times: dict[str, list[float]] = {name: [] for name in libraries}
    until = time.perf_counter() + seconds * len(libraries)
    while time.perf_counter() < until:
        for name, loaded in libraries.items():
            call(loaded.kernels)
            turn_ends = time.perf_counter() + 0.02
            while True:
                begin = time.perf_counter()
                call(loaded.kernels)
                end = time.perf_counter()
                times[name].append((end - begin) * 1e6)
                if end > turn_ends:
                    break
    return {name: {"best": min(all_), "median": statistics.median(all_)} for name, all_ in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="another build of the library")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each kernel and library")
    parser.add_argument("--only", default="", help="cases whose names have this")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    loaded = library.load()
    assert loaded is not None, "needs the native library"
    libraries = {"before": library.Library(options.before)} if options.before else {}
    libraries["now"] = loaded
    for one in libraries.values():
        one.set_threads(options.threads)
    results = {}
    with torch.inference_mode():
        for name, make in cases().items():
            if options.only not in name:
                continue
            results[name] = measure(make(), libraries, options.seconds)
            figures = [
                f"{which} {us['best']:9.1f} (median {us['median']:9.1f}) us" for which, us in results[name].items()
            ]
            print(f"{name:36} {'   '.join(figures)}", flush=True)
    if options.output:
        write_report(options.output, environment("torch"), results)


if __name__ == "__main__":
    main()
