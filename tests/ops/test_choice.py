"""Choosing a token: the likeliest one, and draws whose frequencies are the softmax."""

from __future__ import annotations

import torch

from quire.ops.gumbel import gumbel_noise
from quire.ops.sample import draw, first_max


def test_the_lower_index_wins_among_equals() -> None:
    scores = torch.zeros(3, 300)
    scores[0, [7, 200]] = 1.0
    scores[1, 299] = 2.0
    ids, best = first_max(scores)
    assert ids.tolist() == [7, 299, 0]
    assert best.tolist() == [1.0, 2.0, 0.0]


def test_a_draw_is_the_highest_of_logit_plus_noise_whatever_the_batch() -> None:
    logits = torch.randn(9, 60000, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(9) * 7919, torch.arange(9)
    expected = (logits + gumbel_noise(seeds, positions, 60000)).argmax(-1)
    assert torch.equal(draw(logits, seeds, positions), expected)
    alone = [draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(9)]
    assert torch.equal(torch.cat(alone), expected)


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 3)
    counts = draw(logits, torch.arange(20000), torch.zeros(20000, dtype=torch.int64)).bincount(minlength=3)
    torch.testing.assert_close(counts / 20000, logits[0].softmax(-1), atol=0.015, rtol=0)
