"""Latent attention on the CPU: the absorbed form is the unabsorbed one, and no schedule changes a bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.latent import LatentBackend
from quire.attention.native_latent import NativeLatentAttention
from quire.attention.torch_latent import TorchLatentAttention
from quire.kernels.cpu.index import KV_TYPES
from tests.attention.latents import Latents
from tests.kernels.cpu.isa import INSTRUCTION_SETS, examples, needs_library, using

FP8 = torch.float8_e4m3fn
SIZES = [
    (4, 16, 8, 32, 12),
    (3, 24, 6, 37, 20),  # no multiple of any vector
    (16, 32, 64, 128, 32),
    (40, 16, 16, 48, 16),  # more heads than one unit of work takes
]
TORCH = TorchLatentAttention()
BACKENDS: list[Callable[[], LatentBackend]] = [
    pytest.param(lambda: TORCH, id="torch"),
    pytest.param(lambda: NativeLatentAttention(), id="native", marks=needs_library),
]


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_absorbed_form_is_the_unabsorbed_one(make: Callable[[], LatentBackend], sizes: tuple[int, ...]) -> None:
    latents = Latents(sizes, [1, 17, 300, 128], make())
    latents.step({2: 150, 1: 17, 0: 1})
    latents.step({3: 128, 2: 149})
    latents.step({2: 1})
    for row in range(4):
        torch.testing.assert_close(latents.out[row].double(), latents.unabsorbed(row), atol=3e-5, rtol=1e-4)


@needs_library
@pytest.mark.parametrize(("kv_dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.int8, 5e-2)])
def test_a_smaller_cache_costs_little_accuracy(kv_dtype: torch.dtype, error: float) -> None:
    latents = Latents(SIZES[2], [300], NativeLatentAttention(), kv_dtype=kv_dtype)
    latents.step({0: 300})
    assert (latents.out[0] - latents.unabsorbed(0)).abs().max() < error


@pytest.mark.parametrize("make", BACKENDS)
def test_an_fp8_cache_errs_by_a_sixteenth_at_most(make: Callable[[], LatentBackend]) -> None:
    """A latent in three bits of mantissa is off by 2^-4 of itself at most, and by chance by half of that."""
    latents = Latents(SIZES[2], [300], make(), kv_dtype=FP8)
    latents.step({0: 299})
    latents.step({0: 1})
    expected = latents.unabsorbed(0)
    assert (latents.out[0] - expected).norm() < 2**-4 * expected.norm()


@needs_library
def test_kernels_keep_the_fp8_numbers_of_the_reference() -> None:
    """Those beyond 448 too, which become 448."""
    caches = []
    for backend in (TORCH, NativeLatentAttention()):
        latents = Latents(SIZES[0], [40], backend, kv_dtype=FP8, rotates=False)
        latents.latent[0][3:, 32:] *= 300
        latents.step({0: 40})
        caches.append(latents.cache.float())
    assert torch.equal(caches[0].abs().amax(), torch.tensor(448.0))
    # A norm may round otherwise in the last bit, and then an fp8 number may be the next one.
    assert (caches[0] != caches[1]).float().mean() < 1e-3
    torch.testing.assert_close(caches[0], caches[1], rtol=2**-3, atol=2**-8)


@needs_library
@pytest.mark.parametrize("up_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_up_projections_of_half_the_size(up_dtype: torch.dtype) -> None:
    latents = Latents(SIZES[1], [40], NativeLatentAttention(), up_dtype=up_dtype)
    latents.step({0: 40})
    torch.testing.assert_close(latents.out[0].double(), latents.unabsorbed(0), atol=3e-5, rtol=1e-4)


def run_cut(latents: Latents, data: st.DataObject) -> None:
    while any(d < n for d, n in zip(latents.done, latents.lengths, strict=True)):
        open_rows = [r for r, n in enumerate(latents.lengths) if latents.done[r] < n]
        chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        latents.step({r: data.draw(st.integers(1, latents.lengths[r] - latents.done[r])) for r in chosen})


@examples(10)
@given(data=st.data(), sizes=st.sampled_from(SIZES), kv_dtype=st.sampled_from([torch.float32, FP8]))
def test_any_schedule_gives_the_same_bits_in_torch(
    data: st.DataObject, sizes: tuple[int, ...], kv_dtype: torch.dtype
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    whole, cut = (Latents(sizes, lengths, TORCH, kv_dtype=kv_dtype) for _ in range(2))
    for row, n in enumerate(lengths):
        whole.step({row: n})
    run_cut(cut, data)
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


@needs_library
@examples(15)
@given(data=st.data(), sizes=st.sampled_from(SIZES), kv_dtype=st.sampled_from(list(KV_TYPES)))
def test_any_schedule_gives_the_same_bits(data: st.DataObject, sizes: tuple[int, ...], kv_dtype: torch.dtype) -> None:
    isa = data.draw(st.sampled_from(INSTRUCTION_SETS))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4))
    block = 2 ** data.draw(st.integers(0, 7))
    backend = NativeLatentAttention()
    whole = Latents(sizes, lengths, backend, kv_dtype=kv_dtype)
    cut = Latents(sizes, lengths, backend, kv_dtype=kv_dtype, block_size=block)
    with using(isa):
        for row, n in enumerate(lengths):
            whole.step({row: n})
    with using(isa, threads=data.draw(st.integers(1, 3))):
        run_cut(cut, data)
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


@needs_library
@pytest.mark.parametrize("kv_dtype", list(KV_TYPES), ids=str)
def test_what_is_not_finite_stays_in_its_row(kv_dtype: torch.dtype) -> None:
    backend = NativeLatentAttention()
    sound, broken = (Latents(SIZES[0], [40, 40], backend, kv_dtype=kv_dtype) for _ in range(2))
    broken.latent[0][20] = torch.nan
    for latents in (sound, broken):
        latents.step({0: 40, 1: 40})
    assert torch.equal(sound.out[1], broken.out[1])
    assert not broken.out[0][20:].isfinite().any()
    used = broken.tables[0].long()
    backend.heal(broken.cache, used)
    broken.done = [39, 40]
    broken.latent[0][20] = 0.0
    broken.step({0: 1})
    assert broken.out[0][39].isfinite().all()
