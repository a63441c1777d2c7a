"""Thinking budgets: the feature does what a plain reading of the outputs says, step by step or resumed anywhere."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.runner.sampling.base import RowState
from quire.runner.sampling.sampler import Sampler
from quire.runner.sampling.thinking_budget import ThinkingBudget
from quire.types.sampling import SamplingParams, ThinkingMarks
from tests.runner.sampling.helpers import CPU, MAX_LENGTH, MAX_ROWS, Rows, run, sample, start_of
from tests.runner.sampling.reference import Row

VOCAB = 8
MARKS = [((5,), (6,)), ((5, 5), (1, 1, 2)), ((5,), (1, 2, 1, 3)), ((), (4,))]


def forced(outputs: list[int], marks: ThinkingMarks, budget: int) -> int | None:
    """The token that must come next, read off the outputs."""
    begin, end = list(marks.begin), list(marks.end)
    start = 0 if marks.is_open else None
    if start is None and begin:
        start = next((at + len(begin) for at in range(4) if outputs[at : at + len(begin)] == begin), None)
    if start is None:
        return None
    thought = outputs[start:]
    if any(thought[at : at + len(end)] == end for at in range(len(thought))) or len(thought) < budget:
        return None
    written = max(j for j in range(len(end)) if j <= len(thought) and thought[len(thought) - j :] == end[:j])
    return end[written]


def make_row(outputs: list[int], marks: ThinkingMarks, budget: int) -> Row:
    params = SamplingParams(temperature=0.0, thinking_token_budget=budget, thinking_marks=marks)
    return Row(params, [5, 6, 5], outputs, 0, ())


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("marks", MARKS)
def test_the_end_is_forced_when_the_budget_is_spent(
    marks: tuple[tuple[int, ...], tuple[int, ...]], is_open: bool
) -> None:
    rng = random.Random(repr((marks, is_open)))
    found = ThinkingMarks(*marks, is_open)
    for trial in range(12):
        budget = rng.randrange(6)
        outputs: list[int] = [5, 5] if trial % 2 else []
        sampler, state = Sampler(VOCAB, MAX_ROWS, CPU), Rows.empty()
        # A row that is in the middle of its output beside one that has never asked, and one that asked before.
        sampler.add_request(1, start_of(1, make_row([5, 1], found, 0)))
        sampler.remove_request(1)
        for index in (0, 1):
            plain = Row(SamplingParams(temperature=0.0), [1], [], 0, ())
            sampler.add_request(index, start_of(index, plain))
            state.place(index, plain)
        sampler.add_request(3, start_of(3, make_row(outputs, found, budget)))
        sampler.apply_staged_writes()
        for _ in range(12):
            state.place(3, make_row(outputs, found, budget))
            logits = torch.tensor([[rng.random() for _ in range(VOCAB)] for _ in range(3)])
            tokens = sample(sampler, logits, [0, 3, 1], state).tokens()
            expected = forced(outputs, found, budget)
            free = logits.argmax(1).tolist()
            assert tokens == [free[0], free[1] if expected is None else expected, free[2]]
            resumed = run(logits[1:2].numpy(), [make_row(outputs, found, budget)])
            assert resumed.tokens() == tokens[1:2]
            outputs = [*outputs, tokens[1]]


def test_rows_that_have_just_started_after_rows_with_drafts() -> None:
    """Once rows have had drafts it looks back over the tokens since its last step: here there are none."""
    marks = ThinkingMarks((5,), (6,), True)
    sampler, state = Sampler(VOCAB, MAX_ROWS, CPU), Rows.empty()
    for index, outputs in ((0, [1]), (1, [1, 1])):
        row = make_row(outputs, marks, 2)
        sampler.add_request(index, start_of(index, row))
        state.place(index, row)
    sampler.apply_staged_writes()
    feature = next(feature for feature in sampler._features if isinstance(feature, ThinkingBudget))
    logits = torch.zeros(1, VOCAB)
    feature.apply(logits, torch.tensor([0]), state, ahead=torch.tensor([0]))
    assert logits.isfinite().all()
    feature.apply(logits, torch.tensor([1]), state)
    assert logits.isfinite().nonzero().tolist() == [[0, 6]]


def test_a_row_that_does_not_ask_leaves_nothing_to_the_next_request() -> None:
    """What the row had before may be longer than the row: its tokens would be looked for behind its end."""
    sampler, state = Sampler(VOCAB, MAX_ROWS, CPU), Rows.empty()
    asking = make_row([1, 1], ThinkingMarks((5,), (6,), True), 2)
    sampler.add_request(1, start_of(1, asking))
    state.place(1, asking)
    for plain in (
        Row(SamplingParams(temperature=0.0), [1], [1] * (MAX_LENGTH - 5), 0, ()),
        Row(SamplingParams(temperature=0.0), [1] * (MAX_LENGTH - 5), [], 0, ()),
    ):
        sampler.add_request(0, start_of(0, plain))
        state.place(0, plain)
        sampler.apply_staged_writes()
        assert sample(sampler, torch.zeros(2, VOCAB), [0, 1], state).tokens() == [0, 6]
        sampler.remove_request(0)


def test_only_rows_that_ask_are_looked_back_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row beside them may have decoded long: each of its tokens would take as long as a step's."""
    sampler, state = Sampler(VOCAB, MAX_ROWS, CPU), Rows.empty()
    plain = Row(SamplingParams(temperature=0.0), [1], [1] * 30, 0, ())
    for index, row in ((0, plain), (1, make_row([1, 1], ThinkingMarks((5,), (6,), True), 2))):
        sampler.add_request(index, start_of(index, row))
        state.place(index, row)
    sampler.apply_staged_writes()
    feature = next(feature for feature in sampler._features if isinstance(feature, ThinkingBudget))
    follow, lengths = feature._follow, list[list[int]]()

    def count(rows: Tensor, state: RowState, outputs: Tensor, *places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lengths.append(outputs.tolist())
        return follow(rows, state, outputs, *places)

    monkeypatch.setattr(feature, "_follow", count)
    feature.apply(torch.zeros(3, VOCAB), torch.tensor([0, 1, 1]), state, ahead=torch.tensor([0, 0, 1]))
    assert lengths == [[30, 2, 3]]


def test_what_may_not_come_is_not_forced() -> None:
    row = make_row([1, 1], ThinkingMarks((5,), (6,), True), 1)
    allowed = Row(SamplingParams(**{**_fields(row), "allowed_token_ids": [2, 3]}), row.prompt, row.outputs, 0, ())
    assert run(torch.arange(VOCAB).float().unsqueeze(0).numpy(), [allowed]).tokens() == [3]


def _fields(row: Row) -> dict[str, object]:
    return {name: getattr(row.params, name) for name in ("temperature", "thinking_token_budget", "thinking_marks")}
