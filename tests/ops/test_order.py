from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops import sample
from quire.ops.sample import first_max
from tests.runner.sampling.reference import in_order

VALUES = st.sampled_from([-np.inf, -3.5, -1.0, -0.0, 0.0, 2.0**-100, 1.0, 2.5, 2.0**100])
LINES = st.integers(1, 300).flatmap(lambda size: st.lists(VALUES, min_size=size, max_size=size))


@settings(deadline=None)
@given(LINES, st.data())
def test_every_function_follows_the_one_order(line: list[float], data: st.DataObject) -> None:
    logits = torch.tensor([line], dtype=torch.float32)
    expected = in_order(np.array(line, dtype=np.float32))
    token, best = first_max(logits)
    assert token.tolist() == expected[:1]
    assert best.item() == line[expected[0]]
    count = data.draw(st.integers(1, len(line)))
    values, token_ids = sample.top_k_tokens(logits, count)
    assert token_ids.tolist() == [expected[:count]]
    assert values.tolist() == [[line[token] for token in expected[:count]]]


@settings(deadline=None)
@given(st.lists(st.tuples(VALUES, st.integers(0, 3)), min_size=1, max_size=60), st.integers(1, 100))
def test_the_kept_prefix_is_the_shortest_that_suffices(tokens: list[tuple[float, int]], needed: int) -> None:
    line, weights = [value for value, _ in tokens], [weight for _, weight in tokens]
    needed = min(needed, sum(weights))
    if needed == 0:
        return
    kept, total = set(), 0
    for token in in_order(np.array(line, dtype=np.float32)):
        if total < needed:
            kept.add(token)
            total += weights[token]
    found = sample.keep_prefix(torch.tensor([line]), torch.tensor([weights]), torch.tensor([needed]))
    # Equals of no weight after the last needed one change nothing; they are the same tokens to the draw.
    assert {token for token in found[0].nonzero().flatten().tolist() if weights[token]} == {
        token for token in kept if weights[token]
    }


@pytest.mark.parametrize("chunk", [1, 100, 1 << 17])
def test_chunks_do_not_change_a_select(chunk: int) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).mul_(4).round_()
    counts = torch.tensor([1, 2, 5, 10, 25, 49, 50])
    kept = sample.keep_prefix(logits, torch.ones(7, 50, dtype=torch.int64), counts, chunk)
    assert kept.sum(1).tolist() == counts.tolist()
    for line, mask, count in zip(logits, kept, counts.tolist(), strict=True):
        assert mask.nonzero().flatten().tolist() == sorted(in_order(line.numpy())[:count])


def test_nan_gives_some_valid_token() -> None:
    logits = torch.full((1, 200), float("nan"))
    assert 0 <= first_max(logits)[0].item() < 200
    sample.keep_prefix(logits, torch.full((1, 200), -(2**63)), torch.tensor([1]))
