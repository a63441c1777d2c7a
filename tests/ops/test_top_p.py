"""top_p against a plain Python computation."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.sample import keep_top_p
from tests.runner.sampling.reference import in_order

VALUES = st.sampled_from([float("-inf"), -3.5, -1.0, -0.0, 0.0, 1.0, 2.5, 30.0])


@given(line=st.lists(VALUES, min_size=1, max_size=40), top_p=st.floats(1e-6, 1.0))
@settings(max_examples=60)
def test_the_shortest_prefix_that_reaches_p_stays(line: list[float], top_p: float) -> None:
    logits = torch.tensor([line])
    probabilities = torch.tensor([[1.0 if value == 0 else 2.0 for value in line]]) / (2 * len(line))
    pairs = zip(line, probabilities[0].tolist(), strict=True)
    weights = [0 if value == float("-inf") else int(p * 2**40) for value, p in pairs]
    needed = max(1, math.ceil(float(sum(weights)) * top_p))
    expected = [float("-inf")] * len(line)
    reached = 0
    for token in in_order(np.array(line, dtype=np.float32)):
        if reached >= needed:
            break
        expected[token] = line[token]
        reached += weights[token]
    found = keep_top_p(logits, probabilities, torch.tensor([top_p], dtype=torch.float64))[0].tolist()
    assert found == expected


def test_a_row_is_cut_alike_in_any_batch() -> None:
    logits = torch.randn(9, 4097, generator=torch.Generator().manual_seed(3)) * 4
    probabilities, top_p = logits.softmax(-1), torch.linspace(0.05, 0.99, 9, dtype=torch.float64)
    together = keep_top_p(logits, probabilities, top_p)
    for row in range(9):
        part = slice(row, row + 1)
        assert torch.equal(keep_top_p(logits[part], probabilities[part], top_p[part]), together[part])
