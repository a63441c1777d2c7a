"""The features one at a time, at the edges that a random search seldom meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.worker.sampling.allowed_tokens import AllowedTokens
from quire.worker.sampling.bad_words import BadWords
from quire.worker.sampling.base import Feature, SampleRows
from quire.worker.sampling.logit_bias import LogitBias
from quire.worker.sampling.min_p import MinP
from quire.worker.sampling.min_tokens import MinTokens
from quire.worker.sampling.penalties import Penalties
from quire.worker.sampling.temperature import Temperature
from tests.worker.sampling.helpers import CPU, Rows, make_row, start_of
from tests.worker.sampling.reference import Row

FEATURES: list[Feature] = [
    AllowedTokens(10, CPU),
    BadWords(10, CPU),
    LogitBias(10, CPU),
    MinTokens(10, CPU),
    Penalties(4, CPU),
    Temperature(4, CPU),
    MinP(4, CPU),
]


def apply(feature: Feature, row: Row, logits: Tensor | None = None, max_num_tokens: int | None = None) -> list[float]:
    state = Rows.empty()
    state.place(2, row)
    feature.add_request(2, start_of(2, row))
    feature.apply_staged_writes()
    logits = torch.zeros(1, 10) if logits is None else logits
    return feature.apply(logits, SampleRows(torch.tensor([2]), [2], max_num_tokens), state)[0].tolist()


def banned(feature: Feature, **row: Any) -> list[int]:
    return [token for token, logit in enumerate(apply(feature, make_row(**row))) if logit == float("-inf")]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: type(feature).__name__)
def test_an_unused_feature_returns_the_logits_untouched(feature: Feature) -> None:
    feature.add_request(0, start_of(0, make_row()))
    feature.apply_staged_writes()
    logits = torch.randn(1, 10)
    before = logits.clone()
    assert feature.apply(logits, SampleRows(torch.tensor([0]), [0]), Rows.empty()) is logits
    assert torch.equal(logits, before)
    feature.remove_request(0)
    feature.remove_request(0)


def test_min_tokens_ends_at_exactly_that_many_outputs() -> None:
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": [4], "eos": (7, 8)}
    feature = MinTokens(10, CPU)
    assert banned(feature, outputs=[], **params) == [4, 7, 8]
    assert banned(feature, outputs=[1], **params) == [4, 7, 8]
    assert banned(feature, outputs=[1, 1], **params) == []
    assert banned(MinTokens(10, CPU), outputs=[1], ignore_eos=True, **params) == [4, 7, 8]
    assert banned(MinTokens(10, CPU), min_tokens=2, eos=(12,)) == []


def test_bad_words_need_their_beginning_among_the_outputs() -> None:
    words = ((5,), (1, 2, 6), (9, 7))
    assert banned(BadWords(10, CPU), bad_words_token_ids=words) == [5]
    assert banned(BadWords(10, CPU), bad_words_token_ids=words, outputs=[2]) == [5]
    assert banned(BadWords(10, CPU), bad_words_token_ids=words, outputs=[1, 2]) == [5, 6]
    assert banned(BadWords(10, CPU), bad_words_token_ids=words, outputs=[1, 2, 9]) == [5, 7]
    # The prompt is 1, 2, 3: what it begins may be finished.
    assert banned(BadWords(10, CPU), bad_words_token_ids=((2, 3, 6),)) == []
    assert banned(BadWords(10, CPU), bad_words_token_ids=((5, 99), (99, 5))) == []


def test_tokens_outside_the_vocabulary_are_out_of_reach_anyway() -> None:
    assert apply(LogitBias(10, CPU), make_row(logit_bias={3: 1.5, 10: 9.0})) == [0, 0, 0, 1.5, 0, 0, 0, 0, 0, 0]
    assert banned(AllowedTokens(10, CPU), allowed_token_ids=[2, 10, 999]) == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[0.0, 4.0, -4.0, 1.0, 8.0, 8.0, 0.0, 0.0, 0.0, 0.0]])
    row = make_row(outputs=[4, 4, 2], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = [0.0, 2.0, -8.75, 0.5, 3.0, 8.0, 0.0, 0.0, 0.0, 0.0]
    assert apply(Penalties(4, CPU), row, logits.clone()) == expected
    assert apply(Penalties(4, CPU), row, logits.clone(), max_num_tokens=6) == expected


def test_penalties_skip_placeholders_outside_the_vocabulary() -> None:
    row = make_row(outputs=[4], repetition_penalty=2.0, frequency_penalty=1.0)
    row.prompt = [99, 3, -1]
    assert apply(Penalties(4, CPU), row, torch.ones(1, 10)) == [1, 1, 1, 0.5, -0.5, 1, 1, 1, 1, 1]


def test_min_p_keeps_the_likeliest_and_its_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.9, -5.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    infinity = float("-inf")
    assert apply(MinP(4, CPU), make_row(min_p=1.0), logits.clone()) == [infinity, 2.0, 2.0, *[infinity] * 7]
    assert apply(MinP(4, CPU), make_row(min_p=0.13), logits.clone())[0] == 0.0
    assert apply(MinP(4, CPU), make_row(min_p=0.14), logits.clone())[0] == infinity
