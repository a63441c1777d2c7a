"""The list of ops: none is missing, and each can be tried out."""

from __future__ import annotations

from quire.ops.registry import OPS


def test_every_op_is_listed_once() -> None:
    names = [op.name for op in OPS]
    assert len(set(names)) == len(names) > 70
    assert {"linear", "rms_norm", "draw_within", "gated_delta"} <= set(names)


def test_the_reference_takes_the_inputs_that_an_op_makes() -> None:
    for op in OPS:
        for seed in range(20):
            op.reference(*op.generate_inputs(seed))
