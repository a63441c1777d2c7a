"""What an eager step feeds to the model, against a plain Python computation, over random rows and plans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.groups import GroupBackends
from quire.layers.attention import ForwardBatch
from quire.runner.eager import Eager, Padding, padded
from quire.runner.forward import StepProgram
from quire.runner.inputs import StepInputs
from quire.runner.prompt_logprobs import LogitsHead, PromptLogprobs
from quire.runner.request_rows import BlockTables, RequestRows
from quire.runner.sampling.sampler import Sampler, SamplingKind
from quire.runner.step import PlannedTokens, SamplePositions, Step, StepShape
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, StepPlan

CPU = torch.device("cpu")
ROWS, LENGTH, BLOCK, GROUPS = 6, 64, 8, 2
LADDER = [4, 8, 12, 16, 24, 32, 64, 128, 256, 384]
SAMPLES = [1, 4, ROWS]


class NotingBackend(AttentionBackend):
    """Hands the batch through, so that it can be looked at."""

    name = "noting"

    def cache_shape(self, *args: Any) -> tuple[int, ...]:
        return (0,)

    def workspace_bytes(self, *args: object) -> int:
        return 0

    def heal(self, cache: Tensor, block_ids: Tensor) -> None:
        raise AssertionError("not called here")

    def prepare(self, batch: AttentionBatch, kind: object, lists: tuple[Tensor, ...]) -> Any:
        return batch

    def write(self, *args: object) -> Any:
        raise AssertionError("not called here")

    def attend(self, *args: object) -> Tensor:
        raise AssertionError("not called here")


class NotingModel:
    """Keeps what it was given; the hidden state of a token is its index in the step."""

    is_bidirectional = False

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, embeds: None) -> Tensor:
        self.input_ids, self.positions, self.batch = input_ids, positions, batch
        tokens = torch.arange(len(input_ids)) if batch.wanted is None else batch.wanted.tokens
        return tokens.float().unsqueeze(1)


def make_state(rng: random.Random) -> tuple[RequestRows, BlockTables]:
    rows, tables = RequestRows(ROWS, LENGTH, CPU), BlockTables(GROUPS, ROWS, LENGTH, BLOCK, CPU)
    tables.tables[:] = torch.tensor([rng.randrange(1, 1000) for _ in range(tables.tables.numel())]).view_as(
        tables.tables
    )
    for row in range(ROWS):
        tokens = [rng.randrange(500) for _ in range(rng.randint(1, LENGTH))]
        rows.start(RowStart(row, str(row), tokens, 1, rng.randrange(len(tokens)), SamplingParams(), 0, ()))
    rows.apply_staged_writes()
    return rows, tables


@given(
    seed=st.integers(0, 1 << 32),
    decode_only=st.booleans(),
    above=st.one_of(st.none(), st.integers(0, 40)),
    every_token=st.booleans(),
)
def test_against_plain_python(seed: int, decode_only: bool, above: int | None, every_token: bool) -> None:
    rng = random.Random(seed)
    state, tables = make_state(rng)
    rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
    left = [state.host_num_tokens[row] - state.host_num_computed[row] for row in rows]
    counts = [1 if decode_only else rng.randint(1, n) for n in left]
    done = [state.host_num_computed[row] for row in rows]
    plan, model, total = StepPlan(0, rows, counts), NotingModel(), sum(counts)
    sampled = [index for index, (n, count) in enumerate(zip(left, counts, strict=True)) if n == count]
    anything: Any = model
    program = StepProgram(
        anything, state, tables, GroupBackends([NotingBackend()] * GROUPS), Sampler(50, ROWS, CPU), LENGTH
    )
    head = LogitsHead(anything, [])
    eager = Eager(program, head, PromptLogprobs(state, head), Padding(LADDER, SAMPLES, above))
    shape = StepShape(total, len(rows), len(sampled), False, every_token, SamplingKind())
    step = Step(plan, shape, state)
    assert eager.forward(step)

    tokens = [
        (row, start + offset) for row, start, count in zip(rows, done, counts, strict=True) for offset in range(count)
    ]
    zeros = [0] * (padded(total, LADDER) - total)
    assert model.positions.tolist() == [position for _, position in tokens] + zeros
    assert model.input_ids.tolist() == [int(state.token_ids[row, position]) for row, position in tokens] + zeros
    contexts = [start + count for start, count in zip(done, counts, strict=True)]
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    assert [int(state.num_computed[row]) for row in rows] == contexts, "the device counts them as computed"
    for group, attention in enumerate(model.batch.attention):
        assert isinstance(attention, AttentionBatch)
        assert attention.lengths == (counts, contexts, None)
        assert attention.attended is not None
        assert attention.attended.tolist() == contexts
        assert (attention.num_tokens, attention.max_context) == (total, max(contexts))
        table = tables.tables[group]
        assert torch.equal(attention.tables, table)
        assert attention.rows.tolist() == rows
        assert (attention.contexts.tolist(), attention.query_starts.tolist()) == (contexts, starts)
        assert (attention.contexts.dtype, attention.query_starts.dtype) == (torch.int32, torch.int32)
        slots = [int(table[row, position // BLOCK]) * BLOCK + position % BLOCK for row, position in tokens]
        assert attention.slot_mapping.tolist() == slots + zeros

    ends = [start + count - 1 for start, count in zip(starts, counts, strict=False)]
    if sampled:
        assert step.hidden is not None
        assert step.hidden[: len(sampled), 0].tolist() == [ends[index] for index in sampled]
    wanted = model.batch.wanted
    if every_token or above is None or total <= above:
        assert wanted is None
        return
    assert wanted is not None
    indices = sampled or [len(rows) - 1]
    indices = indices + indices[-1:] * (padded(len(indices), SAMPLES) - len(indices))
    assert wanted.tokens.tolist() == [ends[index] for index in indices]
    assert wanted.finite.shape == model.input_ids.shape
    for group, attention in enumerate(wanted.attention):
        assert isinstance(attention, AttentionBatch)
        assert attention.lengths == ([1] * len(indices), [contexts[index] for index in indices], None)
        assert torch.equal(attention.tables, tables.tables[group])
        assert attention.rows.tolist() == [rows[index] for index in indices]
        assert attention.contexts.tolist() == [contexts[index] for index in indices]
        assert attention.query_starts.tolist() == list(range(len(indices) + 1))


@given(st.integers(1, 384))
def test_padding_goes_to_the_next_size(count: int) -> None:
    size = padded(count, LADDER)
    assert size in LADDER
    assert size >= count
    assert all(other < count for other in LADDER if other < size)


def test_lists_are_padded_each_with_its_own() -> None:
    inputs = StepInputs(4, 3, (2, 3), 9, CPU)
    tokens = PlannedTokens(5, [0, 2], [7, 3], SamplePositions([1], [6], [4], [3]))
    inputs.load([5, 6], tokens, ([1], [1, 2, 3]))
    lists = inputs.lists
    assert lists.rows.tolist() == [5, 6, 9, 9]
    assert lists.query_starts.tolist() == [0, 2, 5, 5, 5]
    assert lists.contexts.tolist() == lists.attended.tolist() == [7, 3, 1, 1]
    assert (lists.sample_tokens.tolist(), lists.sample_rows.tolist()) == ([4, 0, 0], [6, 9, 9])
    assert lists.sample_contexts.tolist() == [3, 1, 1]
    assert [part.tolist() for part in lists.work] == [[1, -1], [1, 2, 3]]
    assert inputs.has_room_for(4, ([1, 2], []))
    assert not inputs.has_room_for(5, ([], []))
    assert not inputs.has_room_for(1, ([1, 2, 3], []))
    inputs.load([5, 6], replace(tokens, attended=[4, 3]), ([1], [1, 2, 3]))
    assert (lists.contexts.tolist(), lists.attended.tolist()) == ([7, 3, 1, 1], [4, 3, 1, 1])
