"""Scales of a cache in fp8: what is kept is divided by them, and attention undoes that, in every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, LayerCache, make_batch
from quire.attention.cpu_native import NativeAttention
from quire.attention.torch_ref import TorchAttention
from quire.ops.fp8 import FP8
from tests.attention.test_torch_ref import dense
from tests.kernels.cpu.isa import INSTRUCTION_SETS, needs_library, using
from tests.kernels.device import DEVICE, NATIVE
from tests.kernels.triton.paged import needs_triton

BLOCK = 16
LENGTHS = [38, 20, 3]
SPEC = AttentionSpec(2, 1, 16, 0.2)
CAPPED = AttentionSpec(2, 1, 16, 0.25, soft_cap=5.0, sinks=torch.tensor([0.5, 2.0]))
WINDOW = AttentionSpec(2, 1, 16, 0.25, sliding_window=20)
# Rows and their contexts after each step: prompts, a chunk of few tokens, and single queries.
STEPS = [([0, 1], [20, 18]), ([0, 1, 2], [37, 19, 3]), ([0, 1], [38, 20])]


def triton() -> AttentionBackend:
    from quire.attention.triton import TritonAttention

    return type("Small", (TritonAttention,), {"min_shared_rows": 9})()


def shared_triton() -> AttentionBackend:
    from quire.attention.triton import TritonAttention

    return type("Shared", (TritonAttention,), {"min_shared_rows": 2, "long_context": 16, "few_queries": 1})()


def fixed_triton() -> AttentionBackend:
    from quire.attention.triton_fixed import FixedTritonAttention

    return type("Fixed", (FixedTritonAttention,), {"min_segment": 16, "keys_at_a_time": 16, "few_splits": 2})()


BACKENDS = [
    pytest.param(TorchAttention, id="torch_ref"),
    pytest.param(NativeAttention, id="cpu_native", marks=needs_library),
    *(pytest.param(make, id=make.__name__, marks=needs_triton) for make in (triton, shared_triton, fixed_triton)),
]


def device_of(backend: AttentionBackend) -> torch.device:
    return torch.device("cpu") if isinstance(backend, NativeAttention) else DEVICE


def heads(spec: AttentionSpec, key_factor: float = 1.0, value_factor: float = 1.0) -> list[Tensor]:
    """Queries, keys and values of each row as heads [n, all heads, dim], keys and values multiplied."""
    generator = torch.Generator().manual_seed(0)
    total = spec.num_heads + 2 * spec.num_kv_heads
    factors = [1.0] * spec.num_heads + [key_factor] * spec.num_kv_heads + [value_factor] * spec.num_kv_heads
    return [
        torch.randn(n, total, spec.head_dim, generator=generator) * torch.tensor(factors)[:, None] for n in LENGTHS
    ]


def attend(
    backend: AttentionBackend, spec: AttentionSpec, tokens: list[Tensor], dtype: torch.dtype = FP8
) -> list[Tensor]:
    """What each row's tokens get, under STEPS."""
    device = device_of(backend)
    spec = replace(spec, sinks=None if spec.sinks is None else spec.sinks.to(device))
    blocks = [-(-n // BLOCK) for n in LENGTHS]
    order = 1 + torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1))
    tables = torch.zeros(len(LENGTHS), max(blocks) + 1, dtype=torch.int32)
    for row, part in enumerate(order.split(blocks)):
        tables[row, : len(part)] = part.int()
    shape = backend.cache_shape(1 + sum(blocks), BLOCK, spec.num_kv_heads, spec.head_dim, dtype)
    cache, done = torch.zeros(shape, dtype=dtype, device=device), [0] * len(LENGTHS)
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    for rows, contexts in STEPS:
        places = [torch.arange(done[row], context) for row, context in zip(rows, contexts, strict=True)]
        slots = [tables[r, at // BLOCK].long() * BLOCK + at % BLOCK for r, at in zip(rows, places, strict=True)]
        counts = [len(at) for at in places]
        batch = make_batch(counts, contexts, tables[rows].to(device), torch.cat(slots).to(device), BLOCK)
        singles = set(counts) == {1}
        metadata = (
            backend.prepare(batch, backend.decode_kind(None, 2), ()) if singles else backend.prepare_eager(batch)
        )
        at_step = LayerCache(spec, cache, metadata)
        qkv = torch.cat([tokens[r][at].flatten(1) for r, at in zip(rows, places, strict=True)]).to(device)
        out = backend.attend(at_step, backend.write(at_step, qkv, None, None))
        for row, context, part in zip(rows, contexts, out.split(counts), strict=True):
            found[row].append(part.cpu())
            done[row] = context
    return [torch.cat(parts) for parts in found]


def kept(x: Tensor, scale: float) -> Tensor:
    """What an fp8 cache gives back."""
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("spec", [SPEC, CAPPED, WINDOW], ids=["plain", "capped with sinks", "window"])
def test_scales_are_applied_and_undone(make: Callable[[], AttentionBackend], spec: AttentionSpec) -> None:
    """Against dense attention. Triton's interpreter, which rounds to fp8 wrongly, gets what needs no rounding."""
    scaled = replace(spec, kv_scales=(0.046875, 0.75))
    tokens = heads(spec, 4.0, 60.0)
    split = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    rounds = isinstance(make(), TorchAttention | NativeAttention) or NATIVE
    if not rounds:
        for row in tokens:
            row[:, split[0] : -split[2]] = kept(row[:, split[0] : -split[2]], scaled.kv_scales[0])
            row[:, -split[2] :] = kept(row[:, -split[2] :], scaled.kv_scales[1])
    for row, mine in zip(tokens, attend(make(), scaled, tokens), strict=True):
        q, k, v = row.split(split, dim=1)
        expected = dense(spec, q, kept(k, scaled.kv_scales[0]), kept(v, scaled.kv_scales[1]))
        torch.testing.assert_close(mine.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("make", BACKENDS)
def test_powers_of_two_change_no_bit(make: Callable[[], AttentionBackend]) -> None:
    """So that a scale of 1 is no scale, and one that is applied twice or not at all would show."""
    plain = attend(make(), SPEC, heads(SPEC))
    scaled = replace(SPEC, scale=SPEC.scale / 8, kv_scales=(8.0, 0.25))
    for one, other in zip(plain, attend(make(), scaled, heads(SPEC, 8.0, 0.25)), strict=True):
        assert torch.equal(one * 0.25, other)


@needs_library
def test_native_kernels_keep_what_torch_keeps() -> None:
    """Every bit of every finite byte, halfway cases, what is too large, and NaN; on each instruction set."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = codes[codes.isfinite()].unique()
    between = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([449.0, -1e9, torch.inf, 1e-9, -1e-9])])
    x = torch.cat([between, between.nextafter(torch.tensor(0.0)), torch.tensor([torch.nan])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16)).view(-1, 16)
    spec, backend = AttentionSpec(1, 1, 16, 1.0), NativeAttention()
    qkv, slots = torch.cat([torch.zeros_like(x), x, x], dim=1), torch.arange(len(x)) + 64
    batch = make_batch([len(x)], [len(x)], torch.ones(1, 1, dtype=torch.int32), slots, 64)
    for isa in INSTRUCTION_SETS:
        cache = torch.zeros(backend.cache_shape(2, 64, 1, 16, FP8), dtype=FP8)
        with using(isa):
            backend.write(LayerCache(spec, cache, backend.prepare_eager(batch)), qkv, None, None)
        keys, values = cache[0, 1, 0].view(16, 64).T[: len(x)], cache[1, 1, 0][: len(x)]
        expected = x.clamp(-448, 448).to(FP8).float()
        for mine in (keys.float(), values.float()):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", BACKENDS)
def test_what_is_not_a_number_is_seen_and_healed(make: Callable[[], AttentionBackend]) -> None:
    backend, tokens = make(), heads(SPEC)
    device = device_of(backend)
    if isinstance(backend, TorchAttention | NativeAttention) or NATIVE:  # Triton's interpreter makes numbers of it
        tokens[0][25, SPEC.num_heads] = torch.nan
        broken, clean = attend(backend, SPEC, tokens), attend(backend, SPEC, heads(SPEC))
        assert broken[0][25:].isnan().any(1).all()
        assert torch.equal(broken[0][:25], clean[0][:25])
        assert torch.equal(broken[1], clean[1])
    cache = torch.zeros(backend.cache_shape(3, BLOCK, 1, 16, FP8), device=device).to(FP8)
    cache.view(torch.uint8)[:] = torch.arange(cache.numel(), device=device).view(cache.shape) % 256
    before = cache.float()
    backend.heal(cache, torch.arange(3, device=device))
    assert torch.equal(cache.float(), before.nan_to_num(0.0))
