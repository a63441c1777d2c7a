"""The kernels of recurrent layers: each op is its reference on every instruction set; neighbours change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.ops.base import Op
from quire.ops.recurrent import (
    COMPACT,
    GATE,
    GATED_CONV,
    GATED_DELTA,
    GATED_NORM,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    SHORT_CONV,
    STATE_SPACE,
)
from tests.kernels.cpu.test_extremes import each_instruction_set, using
from tests.ops.inputs import INPUTS
from tests.ops.test_states import test_a_row_alone_or_among_others as test_rows_beside_rows

ALL = (
    COMPACT,
    GATE,
    GATED_CONV,
    GATED_DELTA,
    GATED_NORM,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    SHORT_CONV,
    STATE_SPACE,
)
OPS = [op for op in ALL if any(each.name == "native" for each in op.implementations)]

__all__ = ["test_rows_beside_rows"]


@each_instruction_set
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_recurrent_ops_are_their_references(op: Op[Any], isa: str) -> None:
    (native,) = [implementation for implementation in op.implementations if implementation.name == "native"]
    for seed in range(5):
        mine, theirs = INPUTS[op.name](seed), INPUTS[op.name](seed)
        with using(isa):
            found = native.load()(*mine)
        torch.testing.assert_close(found, op.reference(*theirs), atol=op.tolerance, rtol=op.tolerance, equal_nan=True)
        for index in op.changes:
            tolerance = {"atol": op.tolerance, "rtol": op.tolerance, "equal_nan": True}
            torch.testing.assert_close(mine[index], theirs[index], **tolerance)
