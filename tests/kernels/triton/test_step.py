"""The two ends of a step, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.device import DEVICE
from tests.kernels.step_inputs import check_inputs_are_gathered_by_row
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
SCRATCH = 4


def test_inputs_are_gathered_by_row() -> None:
    from quire.kernels.triton.step import gather_decode

    check_inputs_are_gathered_by_row(gather_decode)


@settings(max_examples=20)
@given(
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    spare_rows=st.integers(0, 3),
    spare_tokens=st.integers(0, 200),
    seed=st.integers(0, 99),
)
def test_inputs_of_prompts_are_gathered_by_row(
    counts: list[int], spare_rows: int, spare_tokens: int, seed: int
) -> None:
    from quire.kernels.triton.step import gather_mixed

    block, length, max_rows = 4, 100, len(counts) + spare_rows
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(max_rows + 1, generator=rng)[: len(counts)].tolist()
    contexts = [count + int(torch.randint(length - count, (1,), generator=rng)) for count in counts]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    total = sum(counts)
    token_ids = torch.randint(1, 1 << 17, (max_rows + 1, length), generator=rng, dtype=torch.int32)
    tables = torch.randint(1, 1 << 30, (2, max_rows + 1, length // block), generator=rng, dtype=torch.int32)
    num_computed = torch.full((max_rows + 1,), -1)
    padded = {
        "rows": torch.tensor([*rows, *[max_rows] * spare_rows]),
        "contexts": torch.tensor([*contexts, *[1] * spare_rows], dtype=torch.int32),
        "query_starts": torch.tensor([*starts, *[total] * (spare_rows + 1)], dtype=torch.int32),
    }
    given = [value.to(DEVICE) for value in (*padded.values(), token_ids, num_computed, tables)]
    input_ids, positions, *slots = gather_mixed(*given, block, total + spare_tokens)

    expected = [(0, 0, 0, 0)] * spare_tokens
    for row, count, context in reversed(list(zip(rows, counts, contexts, strict=True))):
        places = range(context - count, context)
        cells = [[int(table[row, at // block]) * block + at % block for table in tables] for at in places]
        expected = [(int(token_ids[row, at]), at, *cell) for at, cell in zip(places, cells, strict=True)] + expected
    found = torch.stack((input_ids, positions, *slots), dim=1)
    assert [tuple(line) for line in found.tolist()] == expected
    computed = dict(zip(rows, contexts, strict=True))
    assert given[4].tolist() == [computed.get(row, -1) for row in range(max_rows + 1)]


class State:
    def __init__(self) -> None:
        self.token_ids = torch.full((5, 12), -1, dtype=torch.int32, device=DEVICE)
        self.num_tokens = torch.tensor([3, 1, 5, 2, 0], device=DEVICE)
        self.num_computed = torch.tensor([2, 0, 4, 1, 0], device=DEVICE)

    def append(self, logits: Tensor, rows: list[int]) -> tuple[list[int], list[int]]:
        from quire.kernels.triton.step import append_greedy

        rows_tensor = torch.tensor(rows, device=DEVICE)
        state = (self.token_ids, self.num_tokens, self.num_computed)
        tokens, broken = append_greedy(logits.to(DEVICE), rows_tensor, *state, SCRATCH).T.tolist()
        return tokens, broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 8192, 8197, 20000])
def test_the_likeliest_token_is_appended(vocab: int, dtype: torch.dtype) -> None:
    wide = torch.randn(3, vocab + 5, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits, state = wide[:, :vocab], State()
    tokens, broken = state.append(logits, [2, SCRATCH, 0])
    highest = logits.float().amax(-1, keepdim=True)
    expected = [int((row == top).nonzero()[0]) for row, top in zip(logits.float(), highest, strict=True)]
    assert (tokens, broken) == (expected, [0, 0, 0])
    assert (int(state.token_ids[2, 5]), int(state.token_ids[0, 3])) == (expected[0], expected[2])
    assert int((state.token_ids != -1).sum()) == 2, "nothing else is written"
    assert state.num_tokens.tolist() == [4, 1, 6, 2, 0]
    assert state.num_computed.tolist() == [3, 0, 5, 1, 0]


def test_the_lowest_id_wins_among_equals() -> None:
    logits = torch.zeros(2, 20000)
    logits[0, [9000, 17, 19999]] = 2.0
    logits[1, [19999, 8192]] = 2.0
    assert State().append(logits, [0, 1]) == ([17, 8192], [0, 0])


@pytest.mark.parametrize("at", [0, 8191, 8192, 9999])
def test_logits_that_are_not_finite_are_told(at: int) -> None:
    logits = torch.randn(5, 10000, generator=torch.Generator().manual_seed(0))
    logits[1, at] = float("nan")
    logits[2, at] = float("inf")
    logits[3, :] = float("-inf")
    logits[4, at] = float("-inf")  # a token that may not be chosen is no error
    tokens, broken = State().append(logits, [0, 1, 2, 3, SCRATCH])
    assert broken == [0, 1, 1, 1, 0]
    assert tokens[0] == int(logits[0].argmax())
    assert all(0 <= token < 10000 for token in tokens)


def test_chosen_tokens_are_appended_and_broken_rows_told() -> None:
    from quire.kernels.triton.step import append_tokens

    state = State()
    tokens = torch.tensor([7, 8, 9], dtype=torch.int32, device=DEVICE)
    highest = torch.tensor([1.0, 0.0, torch.inf], device=DEVICE)
    rows = torch.tensor([2, SCRATCH, 0], device=DEVICE)
    out = append_tokens(tokens, highest, rows, state.token_ids, state.num_tokens, state.num_computed, SCRATCH)
    assert out.T.tolist() == [[7, 8, 9], [0, 0, 1]]
    assert state.num_tokens.tolist() == [4, 1, 6, 2, 0]
    assert state.num_computed.tolist() == [3, 0, 5, 1, 0]
    assert (int(state.token_ids[2, 5]), int(state.token_ids[0, 3])) == (7, 9)
