"""The choice of a sparse indexer: the best keys, of equals the lower positions, and all where there are few."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.latent import index_scores, top_keys


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
