"""The draw within limits, against the op's torch reference and against the noise it is specified by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.gumbel import gumbel_noise
from quire.ops.sample import sample_within as reference
from tests.kernels.device import DEVICE, HALF, NATIVE
from tests.kernels.triton.paged import needs_triton
from tests.ops.inputs.sample_within import generate_inputs

pytestmark = needs_triton


def run(*inputs: Tensor) -> tuple[list[int], list[float]]:
    from quire.kernels.triton.sampling import sample_within

    tokens, highest = sample_within(*(value.to(DEVICE) for value in inputs))
    return tokens.tolist(), highest.tolist()


def parameters(temperature: float, log_min_p: float, top_k: int, top_p: float, rows: int = 1) -> Tensor:
    values = torch.tensor([temperature, log_min_p, top_k, top_p], dtype=torch.float64)
    return values.unsqueeze(1).expand(4, rows).contiguous()


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_any_rows(seed: int) -> None:
    inputs = generate_inputs(seed)
    tokens, highest = reference(*inputs)
    assert run(*inputs) == (tokens.tolist(), highest.tolist())


def test_noise_to_the_bit() -> None:
    """Whichever token is first by logit and noise wins, also where the two are close."""
    rows, size = 6, 9000
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**40 + 7, 5])
    noise = gumbel_noise(seeds, positions, size)
    # With the noise taken off, all scores are close to 0 and the order depends on the last bits.
    logits = -noise
    tokens, _ = run(logits, parameters(1.0, -torch.inf, 0, 1.0, rows), seeds, positions)
    assert tokens == (noise + logits).max(-1).indices.tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "log_min_p"), [(1, 1.0, -torch.inf), (0, 1e-9, -torch.inf), (0, 1.0, 0.0), (3, 0.5, -0.1)]
)
def test_only_the_likeliest_is_left(top_k: int, top_p: float, log_min_p: float) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, 2999] = logits[1, 17] = 40.0
    seeds, positions = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert run(logits, parameters(1.7, log_min_p, top_k, top_p, 2), seeds, positions)[0] == [2999, 17]


@pytest.mark.parametrize("top_k", [64, 71, 130])
@pytest.mark.parametrize("steps", [3.0, 1e6])
def test_groups_of_tokens_give_the_same_as_all_of_them(top_k: int, steps: float) -> None:
    """The end of top_k by groups, of which there are 71, and beyond: with many equal logits, and with none."""
    rows, size = 5, 9001
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.round(torch.randn(rows, size, generator=generator) * steps) / steps
    logits[0, 300:428] += 5.0  # nearly all that is taken is in one or two groups
    logits[1] = logits[1].sort(descending=True).values
    inputs = (logits, parameters(1.3, -torch.inf, top_k, 0.9, rows), torch.arange(rows), torch.arange(rows))
    assert run(*inputs)[0] == reference(*inputs)[0].tolist()


def test_more_rounds_than_run_on_all_programs() -> None:
    """With a low top_p the first tokens sampled are mostly outside of it."""
    rows, size = 3, 9001
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(0))
    inputs = (logits, parameters(1.0, -torch.inf, 0, 0.002, rows), torch.arange(rows), torch.arange(rows))
    assert run(*inputs)[0] == reference(*inputs)[0].tolist()


@pytest.mark.skipif(not NATIVE, reason="takes minutes in the interpreter, whose programs run one after the other")
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.95), (40, 0.9), (300, 1.0)])
@pytest.mark.parametrize(
    ("rows", "start"), [(8, 0), *(pytest.param(64, 100 * turn, id=f"again-{turn}") for turn in range(10))]
)
def test_programs_that_share_many_rows(top_k: int, top_p: float, rows: int, start: int) -> None:
    size = 151936
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(rows, size, generator=generator, device=DEVICE) * 3
    seeds = torch.arange(rows, device=DEVICE)
    limits = parameters(0.8, -torch.inf, top_k, top_p, rows).to(DEVICE)
    inputs = (logits, limits, seeds, seeds + start)
    assert run(*inputs)[0] == reference(*inputs)[0].tolist()


def test_half_precision_bans_and_broken_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5000, generator=generator).to(HALF)
    logits[0, ::2] = -torch.inf
    logits[2, 77] = torch.nan
    logits[3] = -torch.inf
    seeds, positions = torch.arange(4), torch.arange(4)
    tokens, highest = run(logits, parameters(0.8, -torch.inf, 0, 0.9, 4), seeds, positions)
    expected, _ = reference(logits[:2], parameters(0.8, -torch.inf, 0, 0.9, 2), seeds[:2], positions[:2])
    assert tokens[:2] == expected.tolist()
    assert tokens[0] % 2 == 1
    assert all(0 <= token < 5000 for token in tokens)
    assert highest[2:] == [torch.inf, -torch.inf]
