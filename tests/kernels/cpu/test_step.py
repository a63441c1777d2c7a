"""The two ends of a recorded decode step in the native library, against plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.ops import first_max
from quire.kernels.cpu.step import append_chosen, draw_by_row, gather_inputs
from quire.ops.draw_within import draw_within
from tests.kernels.step_inputs import check_inputs_are_gathered_by_row

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

SCRATCH = 4


def test_inputs_are_gathered_by_row() -> None:
    check_inputs_are_gathered_by_row(gather_inputs, torch.device("cpu"))


class State:
    def __init__(self) -> None:
        self.token_ids = torch.full((5, 12), -1, dtype=torch.int32)
        self.num_tokens = torch.tensor([3, 1, 5, 2, 0])
        self.num_computed = torch.tensor([2, 0, 4, 1, 0])

    def append(self, logits: Tensor, rows: list[int]) -> list[list[int]]:
        state = (self.token_ids, self.num_tokens, self.num_computed)
        ids, best = first_max(logits)
        out: list[list[int]] = append_chosen(ids.int(), best, torch.tensor(rows), *state, SCRATCH).tolist()
        return out


def test_the_chosen_token_is_appended_and_the_row_advances() -> None:
    state = State()
    logits = torch.zeros(3, 301)
    logits[0, 300], logits[1, [7, 290]], logits[2, 5] = 2.0, 1.0, 3.0
    assert state.append(logits, [2, SCRATCH, 0]) == [[300, 0], [7, 0], [5, 0]]
    assert state.num_tokens.tolist() == [4, 1, 6, 2, 0]
    assert state.num_computed.tolist() == [3, 0, 5, 1, 0]
    expected = torch.full((5, 12), -1, dtype=torch.int32)
    expected[2, 5], expected[0, 3] = 300, 5
    assert torch.equal(state.token_ids, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_whose_logits_broke_are_told(value: float) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 17] = value
    flags = [broken for _, broken in State().append(logits, [0, 1, 2])]
    assert flags == [0, 1, 0]


def test_rows_draw_with_their_own_parameters() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.zeros(4, 5, dtype=torch.float64)
    table[0], table[1], table[2], table[3] = torch.tensor([0.0, 0.7, 1.0, 2.0, 0.5]), -torch.inf, 7, 0.95
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
    known, prompt = torch.tensor([9, 4, 6, 8, 2**40]), torch.tensor([3, 4, 1, 2, 1])
    rows = torch.tensor([4, 0, 3, 3])
    logits = torch.randn(4, 333, generator=generator)
    tokens, highest = draw_by_row(logits, rows, table, seeds, known, prompt)
    expected = draw_within(logits, table[:, rows], seeds[rows], known[rows] - prompt[rows])
    assert torch.equal(tokens, expected[0])
    assert torch.equal(highest, expected[1])
