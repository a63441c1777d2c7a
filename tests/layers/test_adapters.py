"""What layers with adapters are given by the target they are built for."""

from __future__ import annotations

import pytest
import torch

from quire.layers.adapters import AdapterSizes, ExpertAdapters
from quire.ops.base import Target
from quire.ops.grouped import GROUPED_DOWN, GROUPED_GATE_UP
from tests.kernels.triton.paged import needs_triton


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_with_adapters_have_kernels_of_a_gpu(dtype: torch.dtype) -> None:
    """The references wait for the device, which a captured step must not."""
    target = Target("cuda", dtype, deterministic=True)
    adapters = ExpertAdapters(4, 16, [8, 8], AdapterSizes(((8, 2),), on_experts=True), target)
    assert adapters._tile.__module__ == "quire.kernels.triton.lora"
    for op in (GROUPED_GATE_UP, GROUPED_DOWN):
        assert op.choose(target)[1].startswith("triton")
