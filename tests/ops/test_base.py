"""Ops choose the first implementation that serves a target, import only that one, and say why."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quire.ops.base import Implementation, Op, Target
from tests.ops.inputs import INPUTS, OPS

GPU = Implementation("fast", "nowhere:run", ("gpu",), (torch.bfloat16,))
OP = Op(abs, 0.0, GPU)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target("cpu", torch.bfloat16), "torch reference; fast runs on gpu"),
        (Target("gpu", torch.float32), "torch reference; fast takes no torch.float32"),
    ],
)
def test_the_reference_serves_everything_else(target: Target, reason: str) -> None:
    assert OP.choose(target) == (OP.reference, reason)


def test_an_implementation_that_serves_is_loaded() -> None:
    assert GPU.refuses(Target("gpu", torch.bfloat16)) is None
    with pytest.raises(ModuleNotFoundError, match=r"quire\.kernels\.nowhere"):
        OP.bind(Target("gpu", torch.bfloat16))


def test_references_serve_where_nothing_else_does(torch_kernels: None) -> None:
    for op in OPS:
        assert op.bind(Target("elsewhere")) is op.reference
        assert op.bind(Target("cpu")) is op.reference


def test_ops_have_names_of_their_own_and_inputs_that_their_references_take() -> None:
    assert sorted(op.name for op in OPS) == sorted(INPUTS)
    for op in OPS:
        for seed in range(20):
            op.reference(*INPUTS[op.name](seed))


def test_a_cpu_needs_no_triton() -> None:
    """All that an engine on a CPU imports, in a Python where triton cannot be imported."""
    program = """
import sys
sys.modules["triton"] = None
import quire.worker.worker, quire.attention.registry, quire.models.registry, quire.cli.main
from quire.ops.base import Target
from tests.ops.inputs import OPS
[op.bind(Target()) for op in OPS]
quire.worker.worker.Sampler(100, 4, quire.worker.worker.torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
