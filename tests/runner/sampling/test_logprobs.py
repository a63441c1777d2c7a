from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.ops.logprobs import logprobs
from quire.runner.sampling.logprobs import prompt_logprobs
from tests.runner.sampling import reference
from tests.runner.sampling.helpers import make_logits, make_row, run


@pytest.mark.parametrize(("k", "count"), [(0, 0), (1, 1), (5, 5), (-1, 37), (99, 37)])
def test_prompt_logprobs(k: int, count: int) -> None:
    logits = make_logits(0, 4, 37)
    targets = [3, 36, 0, 17]
    entries = prompt_logprobs(logprobs, torch.tensor(logits), torch.tensor(targets), k)
    for line, target, entry in zip(logits, targets, entries, strict=True):
        assert entry.token_ids == [target, *reference.in_order(line)[:count]]
        np.testing.assert_allclose(entry.logprobs, reference.logprobs(line)[entry.token_ids], atol=3e-6)
        assert entry.rank == 1 + int((line > line[target]).sum())


def test_chunks_of_a_prompt_do_not_change_its_logprobs() -> None:
    logits = torch.tensor(make_logits(1, 9, 50)) * 1.37
    targets = torch.arange(9)
    whole = prompt_logprobs(logprobs, logits, targets, 3)
    for size in (1, 2, 4):
        parts = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
        assert [entry for part in parts for entry in prompt_logprobs(logprobs, *part, 3)] == whole


def test_equals_share_a_rank() -> None:
    entries = prompt_logprobs(logprobs, torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 3), torch.tensor([2, 1, 0]), 0)
    assert [entry.rank for entry in entries] == [1, 1, 3]


def test_logprobs_are_of_the_untouched_distribution() -> None:
    logits = make_logits(2, 1, 37)
    plain = run(logits, [make_row(temperature=0.0, logprobs=4)]).logprobs()[0]
    row = make_row(temperature=1.9, logprobs=4, logit_bias={30: 100.0}, repetition_penalty=1.5, top_k=2)
    changed = run(logits, [row]).logprobs()[0]
    assert changed.token_ids[0] == 30
    assert changed.token_ids[1:] == plain.token_ids[1:]
    assert changed.logprobs[1:] == plain.logprobs[1:]
    assert changed.rank == 1 + int((logits[0] > logits[0, 30]).sum())
