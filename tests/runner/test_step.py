"""A step from its plan to its result: where it samples, and how much of what it sampled holds."""

from __future__ import annotations

import pytest
import torch

from quire.runner.request_rows import RequestRows
from quire.runner.sampling.logprobs import pack_logprobs
from quire.runner.sampling.sampler import SamplingKind
from quire.runner.step import Arrived, Sampled, Step, StepShape, planned_tokens
from quire.types.sampling import SamplingParams
from quire.types.status import MESSAGES, NO_TOKEN
from quire.types.step import RowStart, StepPlan

CPU = torch.device("cpu")


def make_rows(**rows: tuple[int, int]) -> RequestRows:
    """Rows by number with their known and computed tokens."""
    state = RequestRows(8, 64, CPU)
    for name, (known, computed) in rows.items():
        state.start(RowStart(int(name[1:]), name, [1] * known, 1, computed, SamplingParams(), 0, ()))
    return state


def make_step(plan: StepPlan, state: RequestRows, tokens: list[int], codes: list[int] | None = None) -> Step:
    planned = planned_tokens(plan, state)
    assert len(planned.samples) == len(tokens)
    shape = StepShape(planned.total, len(plan.rows), len(tokens), False, False, SamplingKind())
    found = torch.tensor([tokens, codes or [0] * len(tokens)], dtype=torch.int32).T.contiguous()
    return Step(plan, shape, state, planned=planned, sampled=Sampled(Arrived(found)))


def test_a_row_samples_where_it_has_caught_up_and_at_each_draft() -> None:
    state = make_rows(r3=(9, 4), r0=(6, 5), r5=(7, 0), r1=(3, 2))
    plan = StepPlan(0, [3, 0, 5, 1], [5, 3, 6, 1], draft_token_ids={0: [8, 9]})
    planned = planned_tokens(plan, state)
    assert (planned.total, planned.starts, planned.contexts) == (15, [0, 5, 8, 14], [9, 8, 6, 3])
    samples = planned.samples
    assert list(zip(samples.indices, samples.rows, samples.tokens, samples.lengths, strict=True)) == [
        (0, 3, 4, 9),
        (1, 0, 5, 6),
        (1, 0, 6, 7),
        (1, 0, 7, 8),
        (3, 1, 14, 3),
    ]


def test_samples_are_padded_by_the_last_one_or_the_last_token() -> None:
    state = make_rows(r3=(9, 4), r0=(6, 0))
    some = planned_tokens(StepPlan(0, [3, 0], [5, 2]), state)
    padded = some.padded_samples(StepPlan(0, [3, 0], [5, 2]), 3).samples
    assert (padded.rows, padded.tokens, padded.lengths) == ([3] * 3, [4] * 3, [9] * 3)
    plan = StepPlan(0, [0], [2])
    padded = planned_tokens(plan, state).padded_samples(plan, 2).samples
    assert (padded.rows, padded.tokens, padded.lengths) == ([0] * 2, [1] * 2, [2] * 2)


@pytest.mark.parametrize(
    ("sampled", "held"),
    [([7, 8, 9], [7, 8, 9]), ([7, 4, 9], [7, 4]), ([4, 8, 9], [4]), ([4, 4, 4], [4])],
)
def test_a_draft_holds_if_it_is_what_was_sampled_and_all_before_it_hold(sampled: list[int], held: list[int]) -> None:
    state = make_rows(r2=(4, 3), r0=(6, 5), r1=(9, 0))
    plan = StepPlan(4, [2, 0, 1], [1, 3, 2], draft_token_ids={0: [7, 8]})
    result = make_step(plan, state, [5, *sampled]).result()
    assert result.token_ids == [[5], held, []]


def test_logprobs_and_errors_are_told_of_what_holds() -> None:
    state = make_rows(r2=(4, 3), r0=(6, 5))
    plan = StepPlan(4, [2, 0], [1, 3], draft_token_ids={0: [7, 8]})
    step = make_step(plan, state, [5, 7, 4, 9], [0, 0, 0, NO_TOKEN])
    assert step.sampled is not None
    packed = pack_logprobs(torch.ones(3, 1, dtype=torch.int32), torch.tensor([[-0.25], [-0.5], [-1.0]]))
    step.sampled.logprobs, step.sampled.lines = Arrived(packed), [0, 1, 2]
    step.sampled.places, step.sampled.counts = [1, 2, 3], [0, 0, 0]
    step.sampled.errors = {3: "a processor failed"}
    result = step.result()
    assert (result.token_ids, result.errors) == ([[5], [7, 4]], {})
    assert [entry.token_ids for entry in result.logprobs[1]] == [[7], [4]]
    assert [entry.logprobs for entry in result.logprobs[1]] == [[-0.25], [-0.5]]
    failing = make_step(plan, state, [5, 7, 8, 9], [0, 0, 0, NO_TOKEN])
    assert failing.result().errors == {1: MESSAGES[NO_TOKEN]}
