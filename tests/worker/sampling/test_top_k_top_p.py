from __future__ import annotations

import pytest
import torch

from quire.types.sampling import SamplingParams
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.top_k_top_p import TopKTopP
from tests.worker.sampling.helpers import CPU, Rows, make_row, start_of

INF = float("inf")


def kept(logits: torch.Tensor, **params: float) -> tuple[list[int], list[int] | None]:
    """The tokens that survive on the way over the whole vocabulary, and on the way over candidates."""
    feature = TopKTopP(logits.shape[1], 1, CPU)
    feature.add_request(0, start_of(0, make_row(**params)))
    feature.apply_staged_writes()
    rows = SampleRows(torch.tensor([0]), [0])
    few = None
    if feature.has_few_candidates(0):
        values, token_ids = feature.candidates(logits.clone(), rows)
        few = sorted(token_ids[values > -INF].tolist())
    return feature.apply(logits.clone(), rows, Rows.empty())[0].isfinite().nonzero().flatten().tolist(), few


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.1, [1]), (0.25, [1]), (0.2500001, [1, 2]), (0.5, [1, 2]), (0.75, [1, 2, 4]), (0.76, [1, 2, 4, 5])],
)
def test_equal_probabilities_are_cut_exactly_and_lower_ids_stay(top_p: float, expected: list[int]) -> None:
    logits = torch.tensor([[-INF, 3.0, 3.0, -INF, 3.0, 3.0]])
    assert kept(logits, top_p=top_p)[0] == expected
    assert kept(logits, top_p=top_p, top_k=4) == (expected, expected)


def test_top_k_cuts_among_equals_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0, 2.0]])
    assert kept(logits, top_k=3) == ([1, 2, 3], [1, 2, 3])
    assert kept(logits, top_k=1) == ([3], [3])
    assert kept(logits, top_k=5)[0] == [0, 1, 2, 3, 4]


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    assert kept(logits, top_k=2, top_p=0.7) == ([0], [0])  # 0.5 / 0.7 reaches it
    assert kept(logits, top_p=0.75)[0] == [0, 1, 2]


def test_both_ways_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    for top_k in (1, 2, 7, 60, 199):
        for top_p in (0.05, 0.5, 0.93, 1.0):
            logits = torch.randn(1, 200, generator=generator).mul_(8).round_().div_(4)
            whole, few = kept(logits, top_k=top_k, top_p=top_p)
            assert whole == few
            assert len(whole) <= top_k


def test_greedy_and_neutral_rows_cost_nothing() -> None:
    feature = TopKTopP(50, 2, CPU)
    feature.add_request(0, start_of(0, make_row(temperature=0.0, top_k=3, top_p=0.4)))
    feature.add_request(1, start_of(1, make_row(top_k=50, top_p=1.0)))
    logits = torch.randn(2, 50)
    assert feature.apply(logits, SampleRows(torch.tensor([0, 1]), [0, 1]), Rows.empty()) is logits
    assert not feature.has_few_candidates(0)
    assert SamplingParams(temperature=0.0).greedy
