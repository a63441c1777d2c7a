"""Routing against a plain loop over tokens with Python's stable sort, ties included; and rows by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.ops.routing import Routing, route
from tests.ops.inputs.routing import ROUTINGS, generate_inputs
from tests.ops.rows import BATCHES


def by_hand(logits: list[float], bias: list[float], routing: Routing) -> tuple[list[int], list[float]]:
    """One token, in Python's floats."""
    experts = range(len(logits))
    total = sum(math.exp(x) for x in logits)
    scores = {
        "softmax": [math.exp(x) / total for x in logits],
        "sigmoid": [1 / (1 + math.exp(-x)) for x in logits],
        "sqrt_softplus": [math.sqrt(math.log1p(math.exp(x))) for x in logits],
        "logits": logits,
    }[routing.score]
    choice = [float(torch.tensor(score, dtype=torch.float32)) + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // routing.num_groups
    best = [sorted(choice[start : start + size], reverse=True) for start in range(0, len(logits), size)]
    of_group = [values[0] + (values[1] if routing.group_score == "top2" else 0.0) for values in best]
    groups = sorted(range(routing.num_groups), key=lambda group: -of_group[group])[: routing.top_groups]
    ids = sorted((expert for expert in experts if expert // size in groups), key=lambda expert: -choice[expert])
    ids = ids[: routing.top_k]
    chosen = [logits[expert] for expert in ids]
    if routing.weighting == "scores":
        weights = [scores[expert] for expert in ids]
    elif routing.weighting == "softmax":
        weights = [math.exp(x) / sum(map(math.exp, chosen)) for x in chosen]
    elif routing.weighting == "sigmoid":
        weights = [1 / (1 + math.exp(-x)) for x in chosen]
    else:
        weights = []
        for slot, expert in enumerate(ids):
            best_open = logits[expert]
            near = [
                e
                for e in experts
                if e not in ids[:slot]
                and (best_open - logits[e]) / max(abs(logits[e]), best_open) <= routing.mixer_margin
            ]
            weights.append(math.exp(best_open) / sum(math.exp(logits[e]) for e in near))
    if routing.renormalize:
        weights = [weight / sum(weights) for weight in weights]
    return ids, [weight * routing.scale for weight in weights]


@pytest.mark.parametrize("routing", ROUTINGS, ids=range(len(ROUTINGS)))
@pytest.mark.parametrize("has_bias", [False, True])
def test_is_what_a_stable_sort_gives_also_where_scores_are_equal(routing: Routing, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(1, 9, (50, 16), generator=generator) * 0.25  # few values: many are equal
    bias = torch.randint(0, 3, (16,), generator=generator) * 0.5 if has_bias else None
    ids, weights = route(logits, bias, routing)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row in range(50):
        expected = by_hand(logits[row].tolist(), [0.0] * 16 if bias is None else bias.tolist(), routing)
        assert ids[row].tolist() == expected[0]
        torch.testing.assert_close(weights[row], torch.tensor(expected[1]), atol=1e-6, rtol=1e-5)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    ids, weights = route(logits, torch.tensor([0.0, 0.0, 5.0]), Routing(1, score="sigmoid"))
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]


def test_weights_that_are_all_zero_stay_finite() -> None:
    _, weights = route(torch.full((1, 4), -200.0), None, Routing(2, score="sigmoid", renormalize=True))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("seed", range(len(ROUTINGS)))
def test_a_row_is_routed_alike_in_every_batch(seed: int) -> None:
    _, bias, routing = generate_inputs(seed)
    experts = 32
    bias = None if bias is None else torch.rand(experts)

    def rows(count: int) -> Tensor:
        return torch.randn(count, experts) * 3

    row = rows(1)
    expected = route(row, bias, routing)
    for size in BATCHES:
        for position in {0, 1, size // 2, size - 1}:
            batch = rows(size)
            batch[position] = row[0]
            for mine, theirs in zip(route(batch, bias, routing), expected, strict=True):
                assert torch.equal(mine[position], theirs[0]), f"row {position} of {size} differs"
