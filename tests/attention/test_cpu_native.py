"""The native backend: right against dense attention, and the same bits however a sequence is cut and batched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.attention.base import AttentionSpec, HeadNorm, LayerCache, make_batch
from quire.attention.cpu_native import NativeAttention
from quire.kernels.cpu.index import KV_TYPES
from quire.ops.fp8 import FP8
from quire.ops.rope import split_qkv
from tests.attention.test_torch_ref import SINKS, SPECS, Sequences, dense
from tests.kernels.cpu.isa import INSTRUCTION_SETS, each_instruction_set, examples, needs_library, using

pytestmark = needs_library

DTYPES = list(KV_TYPES)
MOST = {torch.float16: 65504.0, FP8: 448.0}  # what is larger becomes this
ODD = AttentionSpec(3, 1, 37, 0.3)
WIDE = AttentionSpec(14, 1, 48, 0.2)  # more query heads than read the cache in place


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the cache gives back for heads x [..., dim]."""
    if dtype != torch.int8:
        return x.to(dtype).float()
    most = x.abs().amax(-1, keepdim=True)
    return (x * (torch.full_like(most, 127) / most)).round() * (most / 127)


def native(spec: AttentionSpec, lengths: list[int], dtype: torch.dtype = torch.float32, block: int = 16) -> Sequences:
    return Sequences(spec, lengths, backend=NativeAttention(), dtype=dtype, block_size=block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*SPECS, ODD, WIDE, SINKS], ids=str)
def test_matches_dense_attention(spec: AttentionSpec, dtype: torch.dtype) -> None:
    sequences = native(spec, [1, 17, 300, 128], dtype)
    with using(threads=2):
        sequences.step({2: 150, 1: 17, 0: 1})
        sequences.step({3: 128, 2: 149})
        sequences.step({2: 1})
    for row in range(4):
        k, v = stored(sequences.k[row], dtype), stored(sequences.v[row], dtype)
        expected = dense(spec, sequences.q[row], k, v)
        torch.testing.assert_close(sequences.out[row].double(), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.int8, 4e-2), (FP8, 0.2)]
)
def test_a_smaller_cache_costs_little_accuracy(dtype: torch.dtype, error: float) -> None:
    sequences = native(SPECS[1], [300], dtype)
    sequences.step({0: 300})
    exact = dense(SPECS[1], sequences.q[0], sequences.k[0], sequences.v[0])
    assert (sequences.out[0] - exact).abs().max() < error


@examples(40)
@given(data=st.data(), spec=st.sampled_from([*SPECS, ODD, WIDE, SINKS]), dtype=st.sampled_from(DTYPES))
def test_any_schedule_gives_the_same_bits(data: st.DataObject, spec: AttentionSpec, dtype: torch.dtype) -> None:
    isa = data.draw(st.sampled_from(INSTRUCTION_SETS))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4))
    block = 2 ** data.draw(st.integers(0, 7))
    whole, cut = native(spec, lengths, dtype), native(spec, lengths, dtype, block)
    with using(isa):
        for row, n in enumerate(lengths):
            whole.step({row: n})
    with using(isa, threads=data.draw(st.integers(1, 3))):
        while any(d < n for d, n in zip(cut.done, lengths, strict=True)):
            open_rows = [r for r, n in enumerate(lengths) if cut.done[r] < n]
            chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
            cut.step({r: data.draw(st.integers(1, lengths[r] - cut.done[r])) for r in chosen})
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [SPECS[1], SPECS[5], ODD, SINKS], ids=str)
def test_long_decodes_shared_by_threads_give_the_same_bits(spec: AttentionSpec, dtype: torch.dtype) -> None:
    results = []
    for threads, last in ((1, 1), (4, 1), (1, 4)):
        sequences = native(spec, [700, 90], dtype)
        with using(threads=threads):
            sequences.step({0: 700 - last, 1: 90 - last})
            sequences.step({0: last, 1: last})
        results.append(torch.cat(sequences.out))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*SPECS, ODD], ids=str)
def test_instruction_sets_agree_to_the_bit(spec: AttentionSpec, dtype: torch.dtype) -> None:
    results = []
    for isa in INSTRUCTION_SETS:
        sequences = native(spec, [150, 20], dtype)
        with using(isa):
            sequences.step({0: 149, 1: 20})
            sequences.step({0: 1})
        results.append(torch.cat(sequences.out))
    assert all(torch.equal(results[0], result) for result in results)


def read_cache(cache: Tensor, slots: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [n, kv_heads, dim] at these slots, from the library's own layout."""
    _, blocks, heads, block_size, _ = cache.shape
    cells = cache.flatten(-2)
    scales = torch.ones(2, blocks, heads, block_size)
    if cache.dtype == torch.int8:
        scales = cells[..., block_size * dim :].contiguous().view(torch.float32)
        cells = cells[..., : block_size * dim]
    keys = cells[0].unflatten(-1, (dim, block_size)).transpose(-1, -2).float() * scales[0].unsqueeze(-1)
    values = cells[1].unflatten(-1, (block_size, dim)).float() * scales[1].unsqueeze(-1)
    block, token = slots // block_size, slots % block_size
    return keys[block, :, token], values[block, :, token]


@each_instruction_set
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 16, 36])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rotation_and_write_match_the_reference(
    rotary_dim: int, normed: bool, dtype: torch.dtype, isa: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(4, 2, 36, 0.2)
    tokens, padding, block_size = 21, 3, 16
    qkv = torch.randn(tokens + padding, 8 * 36, generator=generator)
    norm = HeadNorm(torch.randn(36, generator=generator), torch.randn(36, generator=generator), 1e-6, 1.0)
    angles = torch.rand(tokens + padding, 1, rotary_dim // 2, generator=generator) * 6
    turn = (torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)) if rotary_dim else None
    used = block_size + torch.randperm(3 * block_size, generator=generator)[:tokens]
    slots = torch.cat([used, torch.zeros(padding, dtype=torch.int64)])
    batch = make_batch([tokens], [tokens], torch.ones(1, 4, dtype=torch.int32), slots, block_size)
    backend = NativeAttention()
    cache = torch.zeros(backend.cache_shape(4, block_size, 2, 36, dtype), dtype=dtype)
    with using(isa):
        at = LayerCache(spec, cache, backend.prepare_eager(batch))
        q = backend.write(at, qkv, norm if normed else None, turn)
    expected = split_qkv(qkv, 4, 2, *(norm if normed else (None, None, 0.0, 0.0)), turn)
    torch.testing.assert_close(q.query[:tokens], expected[0][:tokens], atol=1e-5, rtol=1e-5)
    # A last bit before the rounding may become one of the cache's steps.
    step = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.int8: 2e-2, FP8: 0.13}[dtype]
    for mine, theirs in zip(read_cache(cache, used, 36), expected[1:], strict=True):
        torch.testing.assert_close(mine, stored(theirs[:tokens], dtype), atol=step * 2, rtol=step)
    assert not cache[:, 0].any()  # padding is not written: the null block stays zero


@each_instruction_set
def test_extreme_keys_and_values(isa: str) -> None:
    """Halves do not become infinite, int8 has no trouble with zeros and tiny numbers, and NaN is not hidden."""
    spec = AttentionSpec(1, 1, 16, 1.0)
    lines = torch.tensor([[1e6], [-1e6], [0.0], [1e-42], [6e-8], [65504.0], [float("nan")], [float("inf")]])
    for dtype in DTYPES:
        backend = NativeAttention()
        cache = torch.zeros(backend.cache_shape(2, 16, 1, 16, dtype), dtype=dtype)
        qkv = torch.cat([torch.ones(8, 16), lines.expand(8, 16), lines.expand(8, 16)], dim=1)
        slots = torch.arange(16, 24)
        batch = make_batch([8], [8], torch.ones(1, 1, dtype=torch.int32), slots, 16)
        with using(isa):
            backend.write(LayerCache(spec, cache, backend.prepare_eager(batch)), qkv, None, None)
        keys, values = read_cache(cache, slots, 16)
        assert torch.equal(keys.nan_to_num(7), values.nan_to_num(7))
        assert keys[:6].isfinite().all()
        assert keys[6].isnan().all()
        if dtype in MOST:
            expected = lines[:6].clamp(-MOST[dtype], MOST[dtype]).to(dtype).float()
            assert torch.equal(keys[:6, 0], expected.expand(6, 16))
        else:
            torch.testing.assert_close(keys[:6, 0], lines[:6].expand(6, 16), atol=1e-30, rtol=1e-2)
        backend.heal(cache, torch.tensor([1]))
        healed, _ = read_cache(cache, slots, 16)
        assert torch.equal(healed[:6], keys[:6])
        assert not healed[6].any()
        assert healed.isfinite().all()


def test_a_broken_sequence_breaks_no_other() -> None:
    spec = SPECS[1]
    sequences, clean = native(spec, [40, 80]), native(spec, [40, 80])
    sequences.v[0][3] = float("nan")
    for run in (sequences, clean):
        run.step({0: 39, 1: 79})
        run.step({1: 1, 0: 1})
    assert sequences.out[0][3:].isnan().all()
    assert torch.equal(sequences.out[1], clean.out[1])


def test_low_precision_activations_are_left_to_others() -> None:
    assert NativeAttention.refuses(torch.float32) is None
    assert NativeAttention.refuses(torch.bfloat16) is not None
