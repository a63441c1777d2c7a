"""Latent attention by Triton kernels: as the unabsorbed form says, and in fixed mode the same bits in any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.latents import Latents
from tests.kernels.device import DEVICE, HALF, NATIVE
from tests.kernels.triton.paged import needs_triton
from tests.ops.inputs.index import fp8_inputs

pytestmark = needs_triton

SIZES = (4, 16, 16, 32, 16)
ODD = (3, 24, 8, 40, 20)  # no power of two
MANY = (40, 16, 16, 16, 16)  # heads of two programs
# Short contexts count as long ones.
SMALL: dict[str, Any] = {"keys_at_a_time": 16, "min_segment": 32}


def fast(**attributes: Any) -> Any:
    from quire.attention.triton_latent import TritonLatentAttention

    return type("Small", (TritonLatentAttention,), {**SMALL, **attributes})()


def fixed(**attributes: Any) -> Any:
    from quire.attention.triton_latent import FixedTritonLatentAttention

    return type("Small", (FixedTritonLatentAttention,), {**SMALL, **attributes})()


def run(sizes: tuple[int, ...], backend: Any, **options: Any) -> Latents:
    latents = Latents(sizes, [50, 33, 3], backend, device=str(DEVICE), **options)
    latents.step({0: 40, 2: 2})
    latents.step({1: 32, 0: 8, 2: 1})
    latents.step({0: 1, 1: 1})
    latents.step({0: 1}, decode=True)
    return latents


def assert_right(latents: Latents, tolerance: float) -> None:
    for row in range(len(latents.lengths)):
        expected = latents.unabsorbed(row)
        torch.testing.assert_close(latents.out[row].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("make", [fast, fixed])
@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=str)
def test_rows_of_all_kinds_are_right(make: Any, sizes: tuple[int, ...]) -> None:
    assert_right(run(sizes, make(), dtype=torch.float32), 1e-4)


@pytest.mark.parametrize("make", [fast, fixed])
def test_keys_without_a_position(make: Any) -> None:
    assert_right(run(SIZES, make(), dtype=torch.float32, rotates=False), 1e-4)


def test_more_heads_than_a_program_takes() -> None:
    latents = Latents(MANY, [34], fast(), device=str(DEVICE))
    latents.step({0: 33}, padding=0)
    latents.step({0: 1}, decode=True)
    assert_right(latents, 1e-4)


@pytest.mark.parametrize("make", [fast, fixed])
def test_in_half_precision(make: Any) -> None:
    assert_right(run(SIZES, make(), dtype=HALF), 2e-2)


def test_an_fp8_cache_is_within_its_rounding() -> None:
    """A latent in three bits errs by a sixteenth at most; scores of such keys move weights a little more."""
    from quire.kernels.triton import quantize

    if quantize.unavailable():
        pytest.skip("fp8 needs a newer card")
    latents = run(SIZES, fast(), dtype=HALF, kv_dtype=quantize.FP8)
    for row in range(len(latents.lengths)):
        expected = latents.unabsorbed(row)
        assert (latents.out[row].double() - expected).norm() < 0.15 * expected.norm()


def test_a_whole_prompt_is_unabsorbed_in_fast_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.attention import triton_latent

    ran = []
    unabsorbed = triton_latent._unabsorbed

    def spy(*arguments: Any) -> torch.Tensor:
        ran.append(True)
        return unabsorbed(*arguments)

    monkeypatch.setattr(triton_latent, "_unabsorbed", spy)
    for make, expected in ((fast, [True]), (fixed, [])):
        ran.clear()
        latents = Latents(SIZES, [48], make(**({"fused_queries": 40} if make is fast else {})), device=str(DEVICE))
        latents.step({0: 48}, padding=0)
        assert ran == expected
        assert_right(latents, 1e-4 if not NATIVE else 5e-3)


@pytest.mark.parametrize("others", [False, True])
def test_several_whole_prompts_of_a_step_are_unabsorbed_each(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows of every other kind, which stay absorbed and whose bits the prompts do not change."""
    from quire.attention import triton_latent

    spans = []
    unabsorbed = triton_latent._unabsorbed

    def spy(spec: Any, weights: Any, written: Any, span: slice) -> torch.Tensor:
        spans.append((span.start, span.stop))
        return unabsorbed(spec, weights, written, span)

    monkeypatch.setattr(triton_latent, "_unabsorbed", spy)
    lengths = [48, 44, 60, 33, 20]  # the last three: a chunk of many queries, few queries, one
    some, none = (Latents(ODD, lengths, fast(fused_queries=queries), device=str(DEVICE)) for queries in (40, 1 << 30))
    for latents in (some, none):
        if others:
            latents.step({2: 20, 3: 30, 4: 19})
        latents.step({2: 40, 0: 48, 4: 1, 1: 44, 3: 3} if others else {0: 48, 1: 44}, padding=3 if others else 0)
    assert spans == ([(40, 88), (89, 133)] if others else [(0, 48), (48, 92)])
    for row in range(5 if others else 2):
        tolerance = 1e-4 if not NATIVE else 5e-3
        torch.testing.assert_close(some.out[row], none.out[row], atol=tolerance, rtol=tolerance)
        assert torch.equal(some.out[row], none.out[row]) == (row > 1)


def test_splits_of_few_rows_are_added_up_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.attention import triton_latent

    ran = []
    folded_up = triton_latent.folded_up

    def spy(*arguments: Any) -> torch.Tensor:
        ran.append(arguments[0].parts.shape[2])
        return folded_up(*arguments)

    monkeypatch.setattr(triton_latent, "folded_up", spy)
    for most, expected in ((4, [4]), (0, [])):  # and all at once, in a kernel of their own
        monkeypatch.setattr("quire.kernels.triton.latent._FEW_TOKENS", most)
        ran.clear()
        latents = Latents(ODD, [139, 100], fast(), device=str(DEVICE))
        latents.step({0: 138, 1: 99})
        latents.step({0: 1, 1: 1}, decode=True)
        if not NATIVE:
            assert [splits > 1 for splits in ran] == [splits > 1 for splits in expected]
        assert_right(latents, 1e-4)


def test_any_step_gives_the_same_bits_in_fixed_mode() -> None:
    whole = Latents(SIZES, [50, 33, 3], fixed(), device=str(DEVICE), dtype=HALF)
    whole.step({0: 50, 1: 33, 2: 3})
    cut = run(SIZES, fixed(), dtype=HALF)
    for a, b in zip(whole.out, cut.out, strict=True):
        assert torch.equal(a, b)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """Offsets are of 64 bits: on a GPU the blocks lie that far, in the interpreter their ids are made to."""
    if not NATIVE:
        pytest.skip("needs a GPU's memory")
    sizes = (16, 128, 64, 512, 128)
    latents = Latents(sizes, [40], fast(), device="cuda", dtype=HALF)
    num_blocks = (1 << 31) // (16 * 576) + 8
    latents.cache = torch.zeros(num_blocks, 16, 576, dtype=HALF, device="cuda")
    latents.tables[0, :3] = torch.arange(num_blocks - 3, num_blocks)
    latents.step({0: 39})
    latents.step({0: 1}, decode=True)
    assert_right(latents, 3e-2)


INDEX = (5, 24, 20)


def sparse(make_fixed: bool) -> Any:
    from quire.attention.triton_latent import FixedTritonSparseAttention, TritonSparseAttention

    return type("Small", (FixedTritonSparseAttention if make_fixed else TritonSparseAttention,), SMALL)()


@pytest.mark.parametrize("make_fixed", [False, True])
def test_selected_keys_alone_are_attended_to(make_fixed: bool) -> None:
    assert_right(run(ODD, sparse(make_fixed), dtype=torch.float32, index=INDEX), 1e-4)


def test_any_step_gives_the_same_bits_of_selected_keys_in_fixed_mode() -> None:
    whole = Latents(SIZES, [50, 33, 3], sparse(True), device=str(DEVICE), dtype=HALF, index=INDEX)
    whole.step({0: 50, 1: 33, 2: 3})
    cut = run(SIZES, sparse(True), dtype=HALF, index=INDEX)
    dense = run(SIZES, fixed(), dtype=HALF)
    for a, b, c in zip(whole.out, cut.out, dense.out, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:20], c[:20]), "contexts no longer than top-k have the dense bits"


@pytest.mark.parametrize("make_fixed", [False, True])
def test_fp8_index_keys_have_a_scale_each(make_fixed: bool) -> None:
    """Those of any magnitude choose alike, and from codes what the reference chooses; queries are codes too."""
    from quire.kernels.triton import index, quantize
    from quire.ops.latent import select_keys

    if quantize.unavailable():
        pytest.skip("fp8 needs a newer card")

    def run_scaled(factor: float) -> tuple[Latents, torch.Tensor]:
        backend, codes = sparse(make_fixed), []
        write_index = backend.write_index
        backend.write_index = lambda *given: codes.append(write_index(*given)) or codes[-1]
        latents = Latents(SIZES, [50, 33, 3], backend, device=str(DEVICE), index=INDEX, kv_dtype=quantize.FP8)
        assert latents.index is not None
        for _, key, _ in latents.index:
            key.mul_(factor)
        latents.step({0: 40, 2: 2})
        latents.step({1: 32, 0: 9, 2: 1})
        latents.step({0: 1, 1: 1}, decode=True)
        return latents, codes[1]

    (found, (query, weights)), (small, _) = run_scaled(1.0), run_scaled(2.0**-20)
    for a, b in zip(found.out, small.out, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(query.to(quantize.FP8).to(query.dtype), query)
    assert (query.abs().amax(-1) >= 64).all()
    keys = found.cache[..., found.spec.head_dim :]
    rows = (torch.arange(2), torch.tensor([32, 49], dtype=torch.int32), torch.tensor([0, 32, 41], dtype=torch.int32))
    given = (query[:41], weights[:41], keys, found.tables[[1, 0]].to(DEVICE), *(x.to(DEVICE) for x in rows), INDEX[2])
    for inputs in (given, *(fp8_inputs(seed) for seed in range(3))):  # of those many scores are equal
        on_device: Any = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs]
        for a, b in zip(index.select_keys(*on_device), select_keys(*on_device), strict=True):
            assert torch.equal(a, b)


def test_any_step_gives_the_same_bits_of_fp8_index_keys_in_fixed_mode() -> None:
    from quire.kernels.triton import quantize

    if quantize.unavailable():
        pytest.skip("fp8 needs a newer card")
    kinds: dict[str, Any] = {"dtype": HALF, "kv_dtype": quantize.FP8}
    whole = Latents(SIZES, [50, 33, 3], sparse(True), device=str(DEVICE), index=INDEX, **kinds)
    whole.step({0: 50, 1: 33, 2: 3})
    cut, dense = run(SIZES, sparse(True), index=INDEX, **kinds), run(SIZES, fixed(), **kinds)
    for a, b, c in zip(whole.out, cut.out, dense.out, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:20], c[:20]), "contexts no longer than top-k have the dense bits"


def test_scores_of_many_tokens_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.triton.index.MOST_SCORES", 500)
    assert_right(run(SIZES, sparse(False), dtype=torch.float32, index=INDEX), 1e-4)
