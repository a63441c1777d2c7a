"""Matmuls with packed weights on a GPU: microseconds of each way to cut them, beside the bytes over 4.3 TB/s.

    python benchmarks/packed_gpu.py [--only int4 mxfp4 fp8 fp8-large fp8-dense fp8-attention] [--rows 1 16 64 256]
                                    [--ways wide] [--out FILE]

Shapes are those of llama-8b (int4 in groups of 128 with zero points; dense fp8 in 128x128 blocks) and of the experts
of gpt-oss-20b, qwen3-30b-a3b (fp8) and DeepSeek-V3 (large), with uniform routing. Each time is of a CUDA graph over
several weights, so that none is in the L2 cache. Kernels are compiled first, by all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.packed import PackedWeight
from quire.kernels.triton.activation import GATED
from quire.kernels.triton.expert_slots import sort_slots
from quire.kernels.triton.grouped_matmul import GroupedShape
from quire.kernels.triton.packed_fragments import packed_fragments
from quire.kernels.triton.packed_matmul import packed_tiles, unpack
from quire.kernels.triton.packed_rows import packed_rows
from quire.kernels.triton.packed_wide import packed_wide

BANDWIDTH = 4.3e12
INT4 = {
    "gate_up": (28672, 4096, "silu"),
    "down": (4096, 14336, ""),
    "qkv": (6144, 4096, ""),
    "o": (4096, 4096, ""),
}
MXFP4 = {"gate_up": (5760, 2880, "clamped_swiglu"), "down": (2880, 2880, "")}
FP8 = {"gate_up": (1536, 2048, "silu"), "down": (2048, 768, "")}
FP8_LARGE = {"gate_up": (4096, 7168, "silu"), "down": (7168, 2048, "")}
FP8_ATTENTION = {"qkv": (5120, 2048, ""), "o": (2048, 4096, "")}
SHAPES = {
    **{"int4": INT4, "mxfp4": MXFP4, "fp8": FP8, "fp8-large": FP8_LARGE},
    **{"fp8-dense": INT4, "fp8-attention": FP8_ATTENTION},
}
EXPERTS = {"int4": 1, "mxfp4": 32, "fp8": 128, "fp8-large": 256, "fp8-dense": 1, "fp8-attention": 1}
TOP_K = {"mxfp4": 4, "fp8": 8, "fp8-large": 8}
BYTES = dict.fromkeys(SHAPES, 1 + 4 / 128) | {"int4": 0.5 + 3 / 128, "mxfp4": 0.5 + 1 / 32}  # of a weight
PIECES = dict.fromkeys(SHAPES, 128) | {"mxfp4": 64}
# Of bytes: tiles of slots, lines and columns, warps and stages. Few lines or warps have the smaller matrix
# instructions, whose operand bytes are read by words.
BYTE_TILES = {
    64: [(16, 64, 2, 4), (16, 64, 2, 6), (16, 64, 4, 4), (16, 128, 2, 4), (16, 32, 2, 6)],
    256: [(32, 64, 4, 4), (32, 64, 2, 4), (32, 32, 2, 4), (64, 64, 2, 3), (64, 64, 4, 4), (64, 128, 4, 4)],
    1024: [(32, 64, 2, 4), (64, 64, 2, 3), (64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 8, 4), (64, 32, 4, 4)],
}
BYTE_WIDE = {
    64: [(16, 32, 4, 4), (16, 32, 4, 6), (16, 32, 2, 4), (16, 32, 2, 6), (16, 64, 2, 4), (16, 64, 2, 6)],
    256: [(32, 32, 4, 4), (32, 32, 2, 4), (32, 64, 2, 4), (64, 32, 4, 4), (32, 64, 4, 4)],
    1024: [(32, 32, 4, 4), (32, 64, 2, 4), (64, 32, 4, 4), (64, 64, 4, 3), (64, 128, 8, 3), (128, 32, 4, 4)],
}
DENSE_TILES = {
    16: [(16, 64, 2, 4), (16, 128, 4, 4)],
    64: [(64, 64, 4, 4), (64, 128, 8, 4), (64, 64, 2, 3)],
    256: [(128, 128, 8, 3)],
}
DENSE_WIDE = {
    16: [(16, 32, 2, 4), (16, 64, 2, 4), (16, 128, 4, 4), (16, 64, 4, 4)],
    64: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 3), (64, 32, 2, 4), (64, 32, 4, 4)],
    256: [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (256, 64, 8, 3)],
}
# Of 4-bit weights with scaled weights, two sums in turn: tiles, warps, stages, splits.
SCALED = {
    64: [
        *product([(64, 64, 128, 4, 2), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4)], [1, 2, 4]),
        *product([(32, 64, 128, 4, 3), (32, 64, 128, 4, 4), (64, 64, 64, 4, 4), (64, 64, 64, 4, 6)], [1, 4, 8]),
    ],
    256: [
        *product([(128, 64, 128, 4, 2), (128, 64, 128, 4, 3), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4)], [1, 2, 4]),
        *product([(128, 128, 64, 8, 3), (128, 128, 128, 8, 2)], [1, 2]),
    ],
}
KINDS = ["rows", "fragments", "tiles", "wide", "scaled", "paired", "unpack", "unpacked"]
IN_TURN = 300 << 20  # bytes of weights that a graph goes through


class Way(NamedTuple):
    """How a matmul is computed: `rows` without matrix instructions, `scaled` is `wide` with scaled weights.

    `paired` is `scaled` with two pieces in turn.

    `fragments` has `bn` chunks at a time. `unpacked` is the library's matmul behind the kernel that unpacks, and
    `unpack` that kernel alone.
    """

    kind: str
    bt: int  # of rows: words of codes at a time
    bn: int
    warps: int
    stages: int
    splits: int
    bk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.bt}x{self.bn}x{self.bk} w{self.warps} s{self.stages} /{self.splits}"


def ways(rows: int, kind: str) -> Iterator[Way]:
    piece = PIECES[kind]
    if rows >= 64:
        yield Way("unpack", 0, 0, 0, 0, 1)
        if EXPERTS[kind] == 1:
            yield Way("unpacked", 0, 0, 0, 0, 1)
    if rows <= 8 and (rows == 1 or EXPERTS[kind] == 1):
        ahead_of = {"int4": [4, 6, 8], "mxfp4": [4, 5, 6]}
        for ahead, count, warps in product(ahead_of.get(kind, [4, 6, 8]), [1, 2, 4, 8], [2, 4]):
            if warps == 4 or count == 1:
                yield Way("fragments", 0, ahead, warps, 0, count, piece)
    if rows > 1 and kind.startswith("fp8"):
        tiles, copied = (DENSE_TILES, DENSE_WIDE) if EXPERTS[kind] == 1 else (BYTE_TILES, BYTE_WIDE)
        most = min((size for size in tiles if size >= rows), default=max(tiles))
        for name, shapes in (("tiles", tiles[most]), ("wide", copied[most])):
            for bt, bn, warps, stages in shapes:
                for count in (1, 2, 4, 8) if EXPERTS[kind] == 1 else (1,):
                    yield Way(name, bt, bn, warps, stages, count, piece)
        return
    if rows == 1:
        cuts = [(64, 32, 4), (64, 64, 4), (64, 16, 4), (128, 16, 4)]
        for (block, lines, warps), parts in product(cuts, [1, 2, 4]):
            yield Way("rows", block, lines, warps, 0, parts)
    if rows == 1 and kind.startswith("fp8"):
        for bn, warps, stages in product([16, 32, 64], [1, 2, 4], [3, 4, 6]):
            for count in [1] if EXPERTS[kind] > 1 else [1, 2, 4, 8]:
                yield Way("tiles", 16, bn, warps, stages, count, piece)
    if rows <= 16:
        shapes, splits = [(16, 128, 4, 4)], [2, 8]
        wide = [(16, 64, 128, 4, 4), (16, 64, 128, 4, 6), (16, 128, 128, 8, 4), (16, 128, 128, 4, 4)]
        wide_splits = [1, 2, 4, 8]
    elif rows <= 64:
        shapes, splits = [(64, 128, 8, 4)], [1, 4]
        wide = [(64, 128, 128, 8, 4), (64, 128, 128, 4, 4), (64, 64, 128, 4, 4), (64, 64, 128, 4, 3)]
        wide_splits = [1, 2, 4, 8]
        if piece == 64:
            wide = [(16, 64, 64, 4, 6), (16, 128, 64, 8, 6), (16, 128, 64, 4, 6), (32, 64, 64, 4, 6)]
            wide_splits = [1]
    else:
        shapes, splits = [(128, 128, 8, 3)], [1, 2]
        wide = [(128, 128, 128, 8, 3), (128, 64, 128, 4, 3)]
        wide_splits = [1, 2]
        if piece == 64:
            wide = [(64, 128, 64, 8, 4), (32, 128, 64, 8, 6), (64, 64, 64, 4, 4), (32, 64, 64, 4, 6)]
            wide_splits = [1]
    for (bt, bn, warps, stages), count in product(shapes, splits):
        yield Way("tiles", bt, bn, warps, stages, count, piece)
    for (bt, bn, bk, warps, stages), count in product(wide, wide_splits):
        yield Way("wide", bt, bn, warps, stages, count, bk)
    if kind == "int4" and rows > 16:
        for (bt, bn, bk, warps, stages), count in SCALED[min(size for size in SCALED if size >= rows)]:
            yield Way("scaled", bt, bn, warps, stages, count, bk)
            yield Way("paired", bt, bn, warps, stages, count, bk)


def make_weight(experts: int, n: int, k: int, kind: str) -> PackedWeight:
    if kind.startswith("fp8"):
        blocks = torch.rand(experts, n // 128, k // 128, device="cuda") / 256
        codes = torch.randint(0, 120, (experts, n, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        return PackedWeight(codes, blocks.repeat_interleave(128, 1), rows_per_scale=128)
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    if kind == "mxfp4":
        exponents = torch.randint(115, 122, (experts, n, k // 32), dtype=torch.uint8, device="cuda")
        return PackedWeight(codes, exponents, None, is_float=True)
    scales = torch.rand(experts, n, k // 128, device="cuda").to(torch.float16) / 256
    zeros = torch.randint(0, 16, (experts, n, k // 128), dtype=torch.uint8, device="cuda")
    return PackedWeight(codes, scales, zeros)


def calls(
    kind: str, name: str, rows: int, way: Way, copies: int, most_experts: int | None = None
) -> list[Callable[[], Tensor]]:
    """The matmul over different weights."""
    n, k, activation = SHAPES[kind][name]
    torch.manual_seed(0)
    if EXPERTS[kind] == 1:
        slots, ids, per_row = None, None, 1
        x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)
        weights = [make_weight(1, n, k, kind) for _ in range(copies)]
    else:
        experts, top_k = min(EXPERTS[kind], most_experts or EXPERTS[kind]), TOP_K[kind]
        ids = torch.rand(rows, experts, device="cuda").argsort(-1)[:, :top_k].to(torch.int32)
        slots = None if way.kind in ("rows", "fragments", "unpack") else sort_slots(ids, experts, way.bt)
        per_row = top_k if name == "gate_up" and way.kind in ("tiles", "rows", "fragments") else 1
        x = torch.randn(rows * top_k // per_row, k, device="cuda").to(torch.bfloat16)
        weights = [make_weight(experts, n, k, kind) for _ in range(copies)]

    def run(weight: PackedWeight) -> Tensor:
        if way.kind == "unpack":
            return unpack(weight, x.dtype)
        if way.kind == "unpacked":
            out = torch.nn.functional.linear(x, unpack(weight, x.dtype))
            return GATED[activation](out) if activation else out
        if way.kind == "fragments":
            how = {"columns": way.bk, "splits": way.splits, "ahead": way.bn, "warps": way.warps}
            return packed_fragments(x, ids, weight, None, activation, per_row=per_row, **how)
        if way.kind == "rows":
            return packed_rows(
                x, ids, weight, None, activation, per_row=per_row,
                splits=way.splits, lines=way.bn, block=way.bt, num_warps=way.warps,
            )  # fmt: skip
        shape = GroupedShape(way.bt, way.bn, way.bk, way.warps, way.stages)
        if way.kind in ("wide", "scaled", "paired"):
            how = {"splits": way.splits, "in_sums": way.kind == "wide", "paired": way.kind == "paired"}
            return packed_wide(x, slots, weight, None, shape, activation, **how)
        return packed_tiles(x, slots, weight, None, per_row, shape, activation, splits=way.splits)

    return [partial(run, weight) for weight in weights]


def floor_us(kind: str, name: str, rows: int) -> float:
    n, k, _ = SHAPES[kind][name]
    experts = EXPERTS[kind] * (1 - (1 - TOP_K.get(kind, 1) / EXPERTS[kind]) ** rows)
    return experts * n * k * BYTES[kind] / BANDWIDTH * 1e6


def compile_one(case: tuple[str, str, int, Way]) -> None:
    try:
        calls(*case, copies=1, most_experts=8)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # a shape that does not fit is no candidate
        print("left out", case, type(error).__name__, flush=True)


def time_one(case: tuple[str, str, int, Way]) -> float:
    kind, name, _, _ = case
    n, k, _ = SHAPES[kind][name]
    each = int(n * k * BYTES[kind]) * EXPERTS[kind]
    run = calls(*case, copies=1 if each > IN_TURN else max(2, IN_TURN // each))
    run[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in run]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 1e9
    for _ in range(4):
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / (3 * len(kept)))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--ways", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--best", type=int, default=4, help="ways to print of each matmul")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [
        (kind, name, rows, way)
        for kind in args.only
        for name in SHAPES[kind]
        for rows in args.rows
        for way in ways(rows, kind)
        if way.kind in args.ways and not (way.kind == "paired" and SHAPES[kind][name][2])
    ]
    few = {(kind, bool(SHAPES[kind][name][2]), rows, way): (kind, name, rows, way)
           for kind, name, rows, way in cases}  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_one, few.values(), chunksize=1)
    found: dict[str, list[tuple[float, str]]] = {}
    for case in cases:
        kind, name, rows, way = case
        key = f"{kind} {name} {rows}"
        try:
            time = time_one(case)
        except Exception as error:
            print("left out", case, type(error).__name__, flush=True)
            continue
        found.setdefault(key, []).append((time, str(way)))
    for key, times in found.items():
        kind, name, rows = key.split()
        ways_by_time = "  ".join(f"{time:.1f} ({way})" for time, way in sorted(times)[: args.best])
        print(f"{key:22} floor {floor_us(kind, name, int(rows)):6.1f}   {ways_by_time}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
