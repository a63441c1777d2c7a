"""Kernels of encoders and of the sparse indexer: each op is its reference on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.cpu.encoder import prompt_sums
from quire.ops.base import Op
from quire.ops.encoder import ADD_PLACES, MARK_SECOND, POSITIONS_OF, PROMPT_SUMS
from quire.ops.latent import SELECT_KEYS
from tests.kernels.cpu.test_extremes import each_instruction_set, using
from tests.ops.inputs import INPUTS

OPS = (ADD_PLACES, MARK_SECOND, POSITIONS_OF, PROMPT_SUMS, SELECT_KEYS)


@each_instruction_set
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_encoder_ops_are_their_references(op: Op[Any], isa: str) -> None:
    (native,) = [implementation for implementation in op.implementations if implementation.name == "native"]
    for seed in range(6):
        mine, theirs = INPUTS[op.name](seed), INPUTS[op.name](seed)
        with using(isa):
            found = native.load()(*mine)
        torch.testing.assert_close(found, op.reference(*theirs), atol=op.tolerance, rtol=op.tolerance, equal_nan=True)


@each_instruction_set
def test_prompts_beside_prompts(isa: str) -> None:
    hidden, starts, counts = INPUTS[PROMPT_SUMS.name](3)
    with using(isa):
        together = prompt_sums(hidden, starts, counts)
        for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
            assert torch.equal(prompt_sums(hidden, [start], [count])[0], together[index])


@each_instruction_set
@pytest.mark.parametrize("extreme", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_a_prompt_that_is_not_finite_stays_by_itself(isa: str, extreme: float) -> None:
    hidden, starts, counts = INPUTS[PROMPT_SUMS.name](2)
    with using(isa):
        before = prompt_sums(hidden, starts, counts)
        hidden[starts[1]] = extreme
        after = prompt_sums(hidden, starts, counts)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2:], after[2:])
    assert not torch.equal(before[1], after[1])
