"""The two ends of a step in the native library, against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.step import append_greedy
from quire.ops.base import Op
from quire.ops.candidates import OFFER_CANDIDATES, SAMPLE_AMONG
from quire.ops.shaping import EDIT_LOGITS, KEEP_ALLOWED, PENALIZE
from quire.ops.step import APPEND_GREEDY, APPEND_TOKENS, GATHER_DECODE, GATHER_MIXED, GATHER_SAMPLING, PLACE_DRAFTS
from quire.types.status import BAD_LOGITS, OK
from tests.kernels.cpu.isa import each_instruction_set, using
from tests.ops.inputs import INPUTS

OPS = (
    *(PLACE_DRAFTS, GATHER_MIXED, GATHER_SAMPLING, KEEP_ALLOWED, EDIT_LOGITS, PENALIZE, APPEND_TOKENS, APPEND_GREEDY),
    *(OFFER_CANDIDATES, SAMPLE_AMONG, GATHER_DECODE),
)

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

SCRATCH = 4


class State:
    def __init__(self) -> None:
        self.token_ids = torch.full((5, 12), -1, dtype=torch.int32)
        self.num_tokens = torch.tensor([3, 1, 5, 2, 0])
        self.num_computed = torch.tensor([2, 0, 4, 1, 0])

    def append(self, logits: Tensor, rows: list[int]) -> list[list[int]]:
        state = (self.token_ids, self.num_tokens, self.num_computed)
        out: list[list[int]] = append_greedy(logits, torch.tensor(rows), *state, SCRATCH).tolist()
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
    assert [code for _, code in State().append(logits, [0, 1, 2])] == [OK, BAD_LOGITS, OK]


@each_instruction_set
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_ops_of_steps_are_their_references(op: Op[Any], isa: str) -> None:
    """On inputs with odd sizes, infinities, rows in any order and padding: results, and what they change."""
    (native,) = [implementation for implementation in op.implementations if implementation.name == "native"]
    for seed in range(5):
        mine, theirs = INPUTS[op.name](seed), INPUTS[op.name](seed)
        with using(isa):
            found = native.load()(*mine)
        expected = op.reference(*theirs)
        both = (found, expected) if isinstance(expected, tuple) else ((found,), (expected,))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, atol=op.tolerance, rtol=op.tolerance)
        for index in op.changes:
            torch.testing.assert_close(mine[index], theirs[index], atol=op.tolerance, rtol=op.tolerance)
