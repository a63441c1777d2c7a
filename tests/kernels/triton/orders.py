"""Which columns tensor cores add up together in kernels of the deterministic mode, read from what is compiled.

    python -m tests.kernels.triton.orders

A matrix instruction adds 16 columns at once. Of operands that come from bytes the compiler gives small tiles columns
that are not side by side (operands in registers, `kWidth` 4), and large ones (`wgmma`) those that are. Both are
right, but a row whose tokens are computed now in a small tile and now in a large one has not the same bits.

Prints, as JSON, the orders of each kernel by what it computes. No GPU is needed; it must be the first in its process
to import Triton.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from tests.kernels.triton.cards import BF16, BLOCK_SIZE, FP8, batch, numbers, pretend

_BITS = {"bf16": 16, "f16": 16, "f8E4M3FN": 8, "f32": 32}
_REGISTERS = re.compile(r"tt\.dot .*? : tensor<[\dx]+x(\w+), #[^>]*?kWidth = (\d+)")
orders: defaultdict[str, set[str]] = defaultdict(set)


def orders_in(ttgir: str) -> set[str]:
    """Of each matmul: whether the columns of an instruction are side by side."""
    found = {"side by side"} if "warp_group_dot " in ttgir else set()
    for kind, width in _REGISTERS.findall(ttgir):
        found.add("side by side" if int(width) * _BITS[kind] == 32 else f"{width} by {width}")
    return found


@contextmanager
def noted(name: str) -> Iterator[None]:
    """Every kernel that runs is compiled anew, and its orders are put down under this name."""
    kept = triton.compiler.CompiledKernel.__init__

    def note(self: Any, *given: Any, **named: Any) -> None:
        kept(self, *given, **named)
        if found := orders_in(self.asm["ttgir"]):
            orders[f"{name}: {self.name}"] |= found

    for module in [module for key, module in sys.modules.items() if key.startswith("quire.kernels.triton")]:
        for value in vars(module).values():
            if isinstance(value, triton.runtime.jit.JITFunction):
                value.device_caches.clear()
    triton.compiler.CompiledKernel.__init__ = note
    try:
        yield
    finally:
        triton.compiler.CompiledKernel.__init__ = kept


def attention() -> None:
    from quire.attention.base import AttentionSpec, LayerCache, Written
    from quire.attention.triton_fixed import FixedTritonAttention

    backend = FixedTritonAttention()
    for kept in (BF16, FP8):
        spec = AttentionSpec(16, 4, 128, 0.1)
        cache = numbers(*backend.cache_shape(64, BLOCK_SIZE, 4, 128, kept), dtype=kept)
        with noted(f"attention, cache in {kept}"):
            for queries, context in (([1] * 3, 999), ([1] * 200, 999), ([9] * 3, 990), ([300], 700)):
                step = backend.prepare_eager(batch(queries, [context] * len(queries)))
                backend.attend(LayerCache(spec, cache, step), Written(numbers(sum(queries), 16, 128)))


def packed_weights() -> None:
    from quire.kernels.packed import PackedWeight
    from quire.kernels.triton import packed_mlp

    packed_mlp.agrees = lambda *of, **how: True

    def make(kind: str, count: int, n: int, k: int) -> PackedWeight:
        def grid(group: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return numbers(count, n, k // group, dtype=dtype)

        half = numbers(count, n, k // 2, dtype=torch.uint8)
        if kind == "fp8 blocks":
            return PackedWeight(numbers(count, n, k, dtype=FP8), grid(128), rows_per_scale=128)
        if kind == "Q8_0":
            return PackedWeight(numbers(count, n, k, dtype=torch.int8), grid(32))
        if kind == "NVFP4":
            return PackedWeight(half, grid(16, FP8), is_float=True, line_scale=numbers(count, n, dtype=torch.float32))
        return PackedWeight(half, grid(128, torch.float16), grid(128, torch.uint8))

    for kind in ("fp8 blocks", "Q8_0", "NVFP4", "int4"):
        whole, gate_up, down = make(kind, 1, 4096, 2048), make(kind, 32, 1536, 2048), make(kind, 32, 2048, 768)
        with noted(f"linear, {kind}"):
            for rows in (1, 16, 300):
                packed_mlp.packed_linear_fixed(numbers(rows, 2048), whole, None, "")
        with noted(f"experts, {kind}"):
            for rows in (1, 16, 300):
                ids, shares = numbers(rows, 4, dtype=torch.int32), numbers(rows, 4, dtype=torch.float32)
                given = (numbers(rows, 2048), ids, shares, gate_up, None, down, None, "silu", False)
                packed_mlp.packed_sparse_mlp_fixed(*given)


def tiles_of_two_and_four_warps() -> None:
    """What must not be: the reason why this file is."""
    from quire.kernels.packed import PackedWeight
    from quire.kernels.triton.grouped_matmul import GroupedShape
    from quire.kernels.triton.packed_matmul import packed_tiles

    weight = PackedWeight(
        numbers(1, 4096, 2048, dtype=FP8), numbers(1, 4096, 16, dtype=torch.float32), rows_per_scale=128
    )
    with noted("two and four warps"):
        for warps in (2, 4):
            packed_tiles(numbers(8, 2048), None, weight, None, 1, GroupedShape(16, 64, 128, warps, 3))


def main() -> None:
    pretend("hopper")
    attention()
    packed_weights()
    tiles_of_two_and_four_warps()
    print(json.dumps({name: sorted(found) for name, found in sorted(orders.items())}))


if __name__ == "__main__":
    main()
