"""Sparse latent attention on the CPU: keys that the indexer selects, and no schedule changes a bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.latent import LatentBackend
from quire.attention.native_latent import NativeLatentAttention, NativeSparseAttention
from quire.attention.torch_latent import TorchLatentAttention
from quire.kernels.cpu.index import KV_TYPES
from quire.kernels.cpu.index import select_keys as native_choice
from quire.ops.latent import select_keys
from tests.attention.latents import Latents
from tests.attention.test_latent import run_cut
from tests.kernels.cpu.isa import INSTRUCTION_SETS, examples, needs_library, using
from tests.ops.inputs.index import fp8_inputs

SIZES = (4, 16, 8, 32, 12)
ODD = (3, 24, 6, 37, 20)  # no multiple of any vector
INDEX = (9, 24, 40)
FP8 = torch.float8_e4m3fn
BACKENDS: list[Callable[[], LatentBackend]] = [
    pytest.param(TorchLatentAttention, id="torch"),
    pytest.param(NativeSparseAttention, id="native", marks=needs_library),
]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=str)
def test_selected_keys_alone_are_attended_to(native: bool, sizes: tuple[int, ...]) -> None:
    backend = NativeSparseAttention() if native else TorchLatentAttention()
    latents, dense = (Latents(sizes, [1, 41, 200], backend, index=(9, 24, k)) for k in (40, 400))
    for one in (latents, dense):
        one.step({2: 150, 1: 40, 0: 1})
        one.step({1: 1, 2: 49})
        one.step({2: 1})
    for row in range(3):
        torch.testing.assert_close(latents.out[row].double(), latents.unabsorbed(row), atol=3e-5, rtol=1e-4)
    assert (latents.out[2] - dense.out[2]).abs().max() > 1e-2, "the selection must matter"


@needs_library
@examples(15)
@given(data=st.data(), sizes=st.sampled_from([SIZES, ODD]), kv_dtype=st.sampled_from(list(KV_TYPES)))
def test_any_schedule_gives_the_same_bits(data: st.DataObject, sizes: tuple[int, ...], kv_dtype: torch.dtype) -> None:
    isa = data.draw(st.sampled_from(INSTRUCTION_SETS))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4))
    block, backend = 2 ** data.draw(st.integers(0, 7)), NativeSparseAttention()
    whole = Latents(sizes, lengths, backend, kv_dtype=kv_dtype, index=INDEX)
    cut = Latents(sizes, lengths, backend, kv_dtype=kv_dtype, index=INDEX, block_size=block)
    with using(isa):
        for row, n in enumerate(lengths):
            whole.step({row: n})
    with using(isa, threads=data.draw(st.integers(1, 3))):
        run_cut(cut, data)
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


@needs_library
@pytest.mark.parametrize("kv_dtype", list(KV_TYPES), ids=str)
def test_contexts_no_longer_than_top_k_have_the_dense_bits(kv_dtype: torch.dtype) -> None:
    """Beside a longer row, so that their keys are selected too."""
    sparse = Latents(SIZES, [40, 90], NativeSparseAttention(), kv_dtype=kv_dtype, index=INDEX)
    dense = Latents(SIZES, [40, 90], NativeLatentAttention(), kv_dtype=kv_dtype)
    for latents in (sparse, dense):
        latents.step({1: 50})
        latents.step({0: 33, 1: 20})
        latents.step({1: 20, 0: 7})
    assert torch.equal(sparse.out[0], dense.out[0])
    assert torch.equal(sparse.out[1][:40], dense.out[1][:40])
    assert not torch.equal(sparse.out[1], dense.out[1])


@pytest.mark.parametrize("make", BACKENDS)
def test_fp8_index_keys_have_a_scale_each(make: Callable[[], LatentBackend]) -> None:
    """Keys and queries of any magnitude choose alike, and beside another row have the same bits in any chunks."""
    found = []
    for factor in (1.0, 2.0**-20, 2.0**20):
        latents = Latents(SIZES, [90, 60], make(), kv_dtype=FP8, index=INDEX)
        assert latents.index is not None
        for query, key, _ in latents.index:
            query.mul_(factor)
            key.mul_(factor)
        if factor == 1.0:
            latents.step({0: 90})
        else:
            latents.step({1: 60, 0: 50})
            latents.step({0: 39})
            latents.step({0: 1})
        found.append(latents.out[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("make", BACKENDS)
def test_fp8_contexts_no_longer_than_top_k_have_the_dense_bits(make: Callable[[], LatentBackend]) -> None:
    sparse = Latents(SIZES, [40, 90], make(), kv_dtype=FP8, index=INDEX)
    dense = Latents(SIZES, [40, 90], make(), kv_dtype=FP8, index=(*INDEX[:2], 400))
    for latents in (sparse, dense):
        latents.step({1: 50, 0: 33})
        latents.step({1: 40, 0: 7})
    assert torch.equal(sparse.out[0], dense.out[0])
    assert torch.equal(sparse.out[1][:40], dense.out[1][:40])
    assert not torch.equal(sparse.out[1], dense.out[1])


@needs_library
@pytest.mark.parametrize("seed", range(6))
def test_of_equal_scores_in_fp8_lower_positions_are_chosen(seed: int) -> None:
    inputs = fp8_inputs(seed)
    for found, expected in zip(native_choice(*inputs), select_keys(*inputs), strict=True):
        assert torch.equal(found, expected)


@needs_library
def test_index_codes_are_the_same_bytes_in_all_kernels() -> None:
    """Of keys that nothing rotates; magnitudes from nothing to the largest, and what is not finite."""
    caches = []
    for backend in (TorchLatentAttention(), NativeSparseAttention()):
        latents = Latents(ODD, [60], backend, kv_dtype=FP8, index=INDEX)
        latents.angles[:, : ODD[2] // 2], latents.angles[:, ODD[2] // 2 :] = 1.0, 0.0
        assert latents.index is not None
        key = latents.index[0][1]
        key *= 2.0 ** torch.linspace(-90, 90, 60)[:, None].round()
        key[3], key[5, 10], key[7, 10] = 0.0, torch.nan, torch.inf
        latents.step({0: 60})
        lines = latents.cache.view(torch.uint8)[1:, :, latents.spec.head_dim :]
        caches.append(lines[..., : INDEX[1] + 1].clone())
        assert caches[-1][..., -1].max() <= 126, "what is more would be healed as if it were NaN"
    unknown = [cache & 0x7F == 0x7F for cache in caches]
    assert unknown[0].sum() == 1
    assert torch.equal(*unknown)
    known = ~unknown[0].any(-1)  # the rest of the other line may be scaled by anything
    assert torch.equal(caches[0][known], caches[1][known])


@needs_library
@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8], ids=str)
def test_what_is_not_finite_is_healed(kv_dtype: torch.dtype) -> None:
    backend = NativeSparseAttention()
    latents = Latents(SIZES, [60], backend, kv_dtype=kv_dtype, index=INDEX)
    assert latents.index is not None
    latents.index[0][1][20] = torch.nan
    latents.latent[0][20] = torch.nan
    latents.step({0: 59})
    backend.heal(latents.cache, latents.tables[0].long())
    latents.step({0: 1})
    assert latents.out[0][59].isfinite().all()
