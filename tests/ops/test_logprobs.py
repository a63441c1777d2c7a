"""Log-probabilities, against double precision and plain sorting."""

from __future__ import annotations

import numpy as np
import torch

from quire.ops.logprobs import logprobs
from tests.ops.inputs.logprobs import generate_inputs
from tests.runner.sampling.reference import in_order


def test_against_plain_python() -> None:
    for seed in range(10):
        logits, chosen, count = generate_inputs(seed)
        integers, values = logprobs(logits, chosen, count)
        width = 1 + min(count, logits.shape[1])
        assert integers.shape == values.shape == (len(logits), width)
        assert (integers.dtype, values.dtype) == (torch.int32, torch.float32)
        for line, token, found, own in zip(logits.numpy(), chosen.tolist(), integers.tolist(), values, strict=True):
            assert found == [1 + int((line > line[token]).sum()), *in_order(line)[: width - 1]]
            wide = line.astype(np.float64)
            expected = wide - np.logaddexp.reduce(wide)
            np.testing.assert_allclose(own.numpy(), expected[[token, *found[1:]]], rtol=3e-6, atol=3e-6)


def test_different_logits_have_different_ranks_though_their_logprobs_round_to_one() -> None:
    logits = torch.tensor([[0.0, 1e-8, 2e-8, 40.0]])
    integers, values = logprobs(logits, torch.tensor([0]), 4)
    assert integers.tolist() == [[4, 3, 2, 1, 0]]
    assert values[0, 2:].unique().numel() == 1


def test_half_precision_is_taken_as_it_is() -> None:
    logits, chosen, count = generate_inputs(3)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = logits.to(dtype)
        for mine, theirs in zip(
            logprobs(rounded, chosen.int(), count), logprobs(rounded.float(), chosen, count), strict=True
        ):
            assert torch.equal(mine, theirs)
