"""The choice of a sparse indexer: the best keys, of equals the lower positions, and all where there are few."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.latent import index_codes, index_scales, index_scores, top_keys


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 25), st.integers(0, 19))
def test_the_best_keys_and_of_equals_the_lower_positions(values: list[int], top_k: int, last: int) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    hidden = torch.arange(len(values)) > last
    seen = [i for i in range(len(values)) if i <= last]
    expected = sorted(sorted(seen, key=lambda i: (-values[i], i))[:top_k])
    assert top_keys(scores, hidden, top_k).nonzero().flatten().tolist() == expected


def test_scores_are_weighted_sums_over_heads_of_what_is_positive() -> None:
    generator = torch.Generator().manual_seed(0)
    products, weights = torch.randn(5, 7, 11, generator=generator), torch.randn(5, 7, generator=generator)
    expected = (products.double().clamp(min=0) * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(index_scores(products, weights).double(), expected, atol=1e-5, rtol=1e-5)


def fp8(x: torch.Tensor) -> torch.Tensor:
    codes, exponents = index_codes(x)
    return codes.double() * index_scales(exponents)


@given(st.integers(0, 1000), st.sampled_from([0.0, 3.0, 8.0]), st.integers(-60, 60))
def test_scores_in_fp8_are_within_their_bound(seed: int, spread: float, exponent: int) -> None:
    """By 0.13 of what scores would be if nothing cancelled: an element is off by 2^-4 of itself at most.

    Elements below 2^-13 of a line's largest are off by 2^-17 of that. `spread`: of their magnitudes, as exponents.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        sizes = 2.0 ** (spread * torch.randn(*shape, generator=generator))
        return torch.randn(*shape, generator=generator) * sizes * 2.0 ** (exponent / 2)

    query, keys, weights = random(3, 4, 32), random(50, 32), torch.randn(3, 4, generator=generator)
    exact = index_scores(query.double() @ keys.double().T, weights)
    found = index_scores(fp8(query) @ fp8(keys).T, weights)
    sizes, floor = (x.double().abs() for x in (query, keys)), 2.0**-13
    q, k = (x + floor * x.amax(-1, keepdim=True) for x in sizes)
    bound = 0.13 * index_scores(q @ k.T, weights.abs())
    assert ((found - exact).abs() <= bound).all()


def test_codes_of_fp8_use_its_range_and_survive_what_is_not_finite() -> None:
    x = torch.tensor([[1.0, -0.5], [0.0, 0.0], [3e38, 1.0], [1e-38, 0.0], [torch.inf, 1.0], [torch.nan, 2.0]])
    codes, exponents = index_codes(x)
    assert (codes.float() * index_scales(exponents))[0].tolist() == [1.0, -0.5]
    assert codes[0].float().tolist() == [128.0, -64.0]
    assert (codes.float() * index_scales(exponents))[1].tolist() == [0.0, 0.0]
    assert codes[2, 0].float() == 448.0
    assert codes[4, 0].float() == 448.0
    assert exponents[4] == 126
    assert codes[5, 0].isnan()
    assert exponents.max() <= 126
