"""The features one at a time, at the edges that a random search seldom meets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.runner.sampling.allowed_tokens import AllowedTokens
from quire.runner.sampling.edits import MAX_BEFORE, MAX_EDITS, Edits
from quire.runner.sampling.mask_buffer import MaskBuffer
from quire.runner.sampling.penalties import Penalties
from quire.runner.sampling.registry import FEATURES, MakeFeature
from quire.runner.sampling.sampler import SamplingKind
from tests.runner.sampling.helpers import CPU, Rows, make_logits, make_row, run, start_of
from tests.runner.sampling.reference import Row

VOCAB, MAX_ROWS = 10, 4


def apply(make: MakeFeature, row: Row, logits: Tensor | None = None) -> list[float]:
    state, feature = Rows.empty(MAX_ROWS), make(VOCAB, MAX_ROWS, CPU)
    state.place(2, row)
    feature.add_request(2, start_of(2, row))
    feature.apply_staged_writes()
    logits = torch.zeros(1, VOCAB) if logits is None else logits.clone()
    feature.apply(logits, torch.tensor([2]), state)
    return logits[0].tolist()


def banned(**row: Any) -> list[int]:
    return [token for token, logit in enumerate(apply(Edits, make_row(**row))) if logit == float("-inf")]


@pytest.mark.parametrize("make", FEATURES)
def test_rows_that_do_not_ask_stay_as_they_are(make: MakeFeature) -> None:
    feature = make(VOCAB, MAX_ROWS, CPU)
    assert not feature.add_request(0, start_of(0, make_row()))
    feature.apply_staged_writes()
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    feature.apply(logits, torch.tensor([0, MAX_ROWS]), Rows.empty(MAX_ROWS))
    assert torch.equal(logits, before)
    feature.remove_request(0)
    feature.remove_request(0)


def test_min_tokens_ends_at_exactly_that_many_outputs() -> None:
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": [4], "eos": (7, 8)}
    assert banned(outputs=[], **params) == [4, 7, 8]
    assert banned(outputs=[1], **params) == [4, 7, 8]
    assert banned(outputs=[1, 1], **params) == []
    assert banned(outputs=[1], ignore_eos=True, **params) == [4, 7, 8]
    assert banned(min_tokens=2, eos=(12,)) == []


def test_bad_words_need_their_beginning_among_the_outputs() -> None:
    words = ((5,), (1, 2, 6), (9, 7))
    assert banned(bad_words_token_ids=words) == [5]
    assert banned(bad_words_token_ids=words, outputs=[2]) == [5]
    assert banned(bad_words_token_ids=words, outputs=[1, 2]) == [5, 6]
    assert banned(bad_words_token_ids=words, outputs=[1, 2, 9]) == [5, 7]
    # The prompt is 1, 2, 3: what it begins may be finished.
    assert banned(bad_words_token_ids=((2, 3, 6),)) == []
    assert banned(bad_words_token_ids=((5, 99), (99, 5))) == []


def test_a_ban_wins_over_a_bias() -> None:
    assert banned(logit_bias={5: 50.0}, bad_words_token_ids=((5,),)) == [5]


def test_tokens_outside_the_vocabulary_are_out_of_reach_anyway() -> None:
    assert apply(Edits, make_row(logit_bias={3: 1.5, 10: 9.0})) == [0, 0, 0, 1.5, 0, 0, 0, 0, 0, 0]


def test_allowed_tokens_are_a_line_of_the_mask_buffer() -> None:
    buffer = MaskBuffer(100, 3, 3, CPU)
    feature = AllowedTokens(100, 3, CPU, buffer)
    assert feature.add_request(1, start_of(1, make_row(allowed_token_ids=[0, 31, 32, 99, 100])))
    feature.apply_staged_writes()
    assert buffer.lines[1].tolist() == [-1, 4, -1, -1]
    assert buffer.masks[4].numpy().view(np.uint32).tolist() == [1 | 1 << 31, 1, 0, 1 << 3]
    feature.remove_request(1)
    feature.apply_staged_writes()
    assert buffer.lines[1].tolist() == [-1] * 4


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[0.0, 4.0, -4.0, 1.0, 8.0, 8.0, 0.0, 0.0, 0.0, 0.0]])
    row = make_row(outputs=[4, 4, 2], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert apply(Penalties, row, logits) == [0.0, 2.0, -8.75, 0.5, 3.0, 8.0, 0.0, 0.0, 0.0, 0.0]


def test_penalties_skip_placeholders_outside_the_vocabulary() -> None:
    row = make_row(outputs=[4], repetition_penalty=2.0, frequency_penalty=1.0)
    row.prompt = [99, 3, -1]
    assert apply(Penalties, row, torch.ones(1, 10)) == [1, 1, 1, 0.5, -0.5, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("params", "is_oversized"),
    [
        ({"logit_bias": dict.fromkeys(range(MAX_EDITS), 0.5)}, False),
        ({"logit_bias": dict.fromkeys(range(MAX_EDITS + 1), 0.5)}, True),
        ({"bad_words_token_ids": (tuple(range(MAX_BEFORE + 1)),)}, False),
        ({"bad_words_token_ids": (tuple(range(MAX_BEFORE + 2)),)}, True),
    ],
)
def test_the_largest_that_captured_steps_take_and_one_more(params: dict[str, Any], is_oversized: bool) -> None:
    """What is larger has the same effect, in eager steps, beside a row that fits."""
    logits = make_logits(1, 2, 700)
    outputs = list(range(MAX_BEFORE + 1))
    found = run(logits, [make_row(temperature=0.0, outputs=outputs, **params), make_row(logit_bias={9: 1.0})])
    assert found.kind == SamplingKind(greedy=False, groups=frozenset({"shaping"}), eager=is_oversized)
    ban = "bad_words_token_ids" in params
    expected = logits[0].copy()
    expected[: len(params.get("logit_bias", ()))] += 0.5
    if ban:
        expected[params["bad_words_token_ids"][0][-1]] = -np.inf
    assert found.tokens()[0] == int(expected.argmax())
