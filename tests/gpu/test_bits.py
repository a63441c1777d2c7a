"""Deterministic mode on a GPU, kernel by kernel: bits do not depend on how many rows a step has.

Sums here are exactly 0, in pairs of terms that stand far apart, so that results are nothing but what rounding leaves
of float32: all of their bits show, of which 16-bit results otherwise hide all but one in tens of thousands.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, AttentionSpec, HostLengths, LayerCache, Written
from quire.kernels.packed import PackedWeight, pack_codes
from tests.gpu.helpers import needs_gpu
from tests.kernels.device import DEVICE

pytestmark = needs_gpu

BLOCK = 16
E4M3 = torch.float8_e4m3fn


def of_many_sizes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers whose sums need rounding, which those of 16-bit numbers of one size hardly do."""
    return 64 * torch.randn(shape, generator=generator) * (-8 * torch.rand(shape, generator=generator)).exp2()


def pairs(
    rows: int, n: int, k: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """x [rows, k] and a weight [n, k] whose products are sums of pairs that cancel, in columns far apart."""
    a, b = torch.randn(n, k // 2, generator=generator), of_many_sizes((rows, k // 2), generator)
    partner, order = torch.randperm(k // 2, generator=generator), torch.randperm(k, generator=generator)
    weight, x = torch.cat((a, a[:, partner]), 1)[:, order], torch.cat((b, -b[:, partner]), 1)[:, order]
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def assert_like_single_rows(x: Tensor, multiply: Callable[[Tensor], Tensor], counts: tuple[int, ...]) -> None:
    """Rows give in steps of each size what they give alone."""
    alone = torch.cat([multiply(row) for row in x[:8].split(1)])
    assert 0 < float(alone.float().abs().mean()) < 2  # nothing but rounding, but not nothing
    for count in counts:
        found = multiply(x[:count])[:8]
        assert torch.equal(found, alone[: found.shape[0]]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k"), [(199, 64), (199, 128), (128, 64), (32001, 256), (1024, 3072), (6144, 1024), (4096, 14336)]
)
def test_linear_layers(n: int, k: int, dtype: torch.dtype) -> None:
    from quire.kernels.triton.fixed_matmul import linear_transposed

    x, weight = pairs(600, n, k, torch.Generator().manual_seed(0), dtype)
    counts = (2, 16, 17, 64, 65, 70, 85, 100, 128, 155, 160, 220, 256, 333, 511, 512, 600)
    assert_like_single_rows(x, lambda x: linear_transposed(x, weight), counts)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 1024)])
def test_fp8_activations(n: int, k: int) -> None:
    from quire.kernels.triton.fp8 import prequantized_linear_fp8_fixed

    x, weight = (part.to(E4M3) for part in pairs(300, n, k, torch.Generator().manual_seed(0)))
    ones = torch.ones(n, device=DEVICE)
    assert_like_single_rows(
        x,
        lambda x: prequantized_linear_fp8_fixed(x, ones[: len(x)], weight, ones, None, torch.bfloat16),
        (2, 16, 17, 64, 65, 300),
    )


def packed_pairs(
    kind: str, n: int, k: int, group: int, rows: int, generator: torch.Generator
) -> tuple[PackedWeight, Tensor]:
    """Groups of the second half have the weights of the first in another order; activations, too, and less than 0."""
    groups, partner = k // group // 2, torch.randperm(group, generator=generator)

    def grid(low: int, high: int, dtype: torch.dtype) -> Tensor:
        half = torch.randint(low, high, (1, n, groups), generator=generator)
        return torch.cat((half, half), -1).to(dtype).to(DEVICE)

    if kind == "e4m3":
        half = torch.randn(1, n, groups, group, generator=generator).to(E4M3).view(torch.int8)
    else:
        low, high = (-127, 128) if kind == "int8" else (0, 16)
        half = torch.randint(low, high, (1, n, groups, group), generator=generator).to(torch.int8)
    codes = torch.cat((half, half[..., partner]), 2).reshape(1, n, k)
    b = of_many_sizes((rows, groups, group), generator)
    x = torch.cat((b, -b[..., partner]), 1).reshape(rows, k).to(DEVICE, torch.bfloat16)
    if kind in ("int8", "e4m3"):
        of_bytes = (codes.view(E4M3) if kind == "e4m3" else codes).to(DEVICE)
        return PackedWeight(of_bytes, grid(11, 31, torch.float32) * 1e-3), x
    words = pack_codes(codes.view(torch.uint8)).to(DEVICE)
    if kind == "e2m1":
        return PackedWeight(words, grid(118, 124, torch.uint8), is_float=True), x
    if kind == "nvfp4":
        return PackedWeight(words, (grid(1, 16, torch.float32) / 64).to(E4M3), is_float=True), x
    zeros = grid(0, 16, torch.uint8) if kind == "zeros" else None
    return PackedWeight(words, grid(11, 31, torch.float16) * 1e-3, zeros), x


@pytest.mark.parametrize(
    ("kind", "group", "n", "k"),
    [
        ("e4m3", 128, 5120, 2048),
        ("e4m3", 128, 2048, 4096),
        ("int8", 128, 4096, 4096),
        ("int8", 32, 4096, 4096),
        ("zeros", 128, 6144, 4096),
        ("implied", 64, 4096, 4096),
        ("implied", 32, 4096, 4096),
        ("e2m1", 32, 5760, 2048),
        ("nvfp4", 16, 4096, 2048),
    ],
)
def test_packed_weights(kind: str, group: int, n: int, k: int) -> None:
    from quire.kernels.triton.packed_mlp import packed_linear_fixed

    weight, x = packed_pairs(kind, n, k, group, 300, torch.Generator().manual_seed(0))
    assert_like_single_rows(
        x, lambda x: packed_linear_fixed(x, weight, None, ""), (2, 8, 9, 16, 17, 40, 64, 65, 128, 129, 300)
    )


@pytest.mark.parametrize(("kind", "group"), [("e4m3", 128), ("int8", 128), ("implied", 32), ("nvfp4", 16)])
def test_packed_experts(kind: str, group: int) -> None:
    """Their second matmul reads what the first gave, so that no sums cancel: numbers are random, and much is hidden.

    That their kernels have one order is what tests/kernels/triton/orders.py is for.
    """
    from quire.kernels.triton.packed_mlp import packed_sparse_mlp_fixed

    generator = torch.Generator().manual_seed(0)
    made = [packed_pairs(kind, 1536, 2048, group, 300, generator) for _ in range(4)]
    gate_up = PackedWeight(
        torch.cat([weight.codes for weight, _ in made]),
        torch.cat([weight.scales for weight, _ in made]),
        is_float=made[0][0].is_float,
    )
    down, _ = packed_pairs(kind, 4 * 2048, 768, group, 1, generator)
    down = down._replace(codes=down.codes.view(4, 2048, -1), scales=down.scales.view(4, 2048, -1))
    x = torch.randn(300, 2048, generator=generator).to(DEVICE, torch.bfloat16)
    ids = torch.randint(0, 4, (300, 2), generator=generator, dtype=torch.int32).to(DEVICE)
    shares = torch.rand(300, 2, generator=generator).to(DEVICE)

    def run(rows: slice) -> Tensor:
        return packed_sparse_mlp_fixed(
            x[rows], ids[rows], shares[rows], gate_up, None, down, None, "silu", in_parts=False
        )[0]

    alone = torch.cat([run(slice(row, row + 1)) for row in range(8)])
    for count in (2, 4, 8, 9, 30, 64, 130, 300):
        assert torch.equal(run(slice(0, count))[:8], alone[:count]), count


def step(rows: int, queries: int, context: int) -> AttentionBatch:
    width = -(-context // BLOCK) + 1
    tables = torch.arange(1, 1 + (rows + 1) * width, dtype=torch.int32).view(rows + 1, width)
    return AttentionBatch(
        tables=tables.to(DEVICE),
        rows=torch.arange(rows, device=DEVICE),
        contexts=torch.full((rows,), context, dtype=torch.int32, device=DEVICE),
        query_starts=(torch.arange(rows + 1, dtype=torch.int32) * queries).to(DEVICE),
        slot_mapping=torch.zeros(rows * queries, dtype=torch.int64, device=DEVICE),
        block_size=BLOCK,
        num_tokens=rows * queries,
        max_context=context,
        padding_row=rows,
        lengths=HostLengths([queries] * rows, [context] * rows),
    )


@pytest.mark.parametrize("context", [100, 1500])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kept"),
    [
        (8, 2, 128, torch.bfloat16),
        (4, 2, 16, torch.bfloat16),
        (8, 2, 64, E4M3),
        (16, 4, 128, E4M3),
        (4, 2, 16, E4M3),
        (2, 1, 256, E4M3),
        (64, 1, 64, E4M3),
    ],
)
def test_attention(heads: int, kv_heads: int, dim: int, kept: torch.dtype, context: int) -> None:
    """Each key stands at two places, with values that cancel; the last query sees all of them."""
    from quire.attention.triton_fixed import FixedTritonAttention

    generator, backend, rows = torch.Generator().manual_seed(0), FixedTritonAttention(), 24
    spec, half, kind = AttentionSpec(heads, kv_heads, dim, dim**-0.5), context // 2, torch.bfloat16
    order = torch.randperm(context, generator=generator)
    some = torch.randn(2, rows, half, kv_heads, dim, generator=generator)
    keys = torch.cat((some[0], some[0]), 1)[:, order].to(DEVICE).to(kept)
    values = torch.cat((some[1], -some[1]), 1)[:, order].to(DEVICE).to(kept)
    tables, at = step(rows, 1, context).tables.long(), torch.arange(context, device=DEVICE)
    cache = torch.zeros(
        backend.cache_shape(int(tables.max()) + 1, BLOCK, kv_heads, dim, kept), dtype=kept, device=DEVICE
    )
    for row in range(rows):
        for part, given in enumerate((keys, values)):
            cache[part, tables[row, at // BLOCK], :, at % BLOCK] = given[row]
    query = torch.randn(rows, context, heads, dim, generator=generator).to(DEVICE, kind)

    def attend(count: int, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        metadata = backend.prepare_eager(step(rows, count, context))
        written = Written(query[:, context - count :].reshape(-1, heads, dim).contiguous(), keys, values)
        return backend.attend(LayerCache(spec, cache, metadata), written).view(rows, count, -1)[:, -1]

    alone = attend(1)
    assert 0 < float(alone.float().abs().mean()) < 1e-3
    for count in (4, 40, context):
        assert torch.equal(attend(count), alone), count
    if kept == kind:
        assert torch.equal(attend(context, keys.flatten(0, 1), values.flatten(0, 1)), alone)
