"""Log-probabilities on the device, against the op's torch reference; and to the bit against themselves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.logprobs import logprobs as reference
from tests.kernels.device import DEVICE, NATIVE
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
TOLERANCE = 3e-6


def run(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    from quire.kernels.triton.logprobs import logprobs

    integers, values = logprobs(logits.to(DEVICE), chosen.to(DEVICE), count)
    return integers.cpu(), values.cpu()


def compare(logits: Tensor, chosen: Tensor, count: int) -> None:
    integers, values = run(logits, chosen, count)
    expected = reference(logits, chosen, count)
    assert torch.equal(integers, expected[0])
    torch.testing.assert_close(values, expected[1], rtol=TOLERANCE, atol=TOLERANCE)


def make(seed: int, rows: int, size: int, values: int, banned: float) -> tuple[Tensor, Tensor]:
    """Logits of so many different values, some of them impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (rows, size), generator=generator) / values * 30.0 - 20.0
    logits[torch.rand(rows, size, generator=generator) < banned] = -torch.inf
    possible = torch.randint(size, (rows, 1), generator=generator)
    return logits.scatter_(1, possible, 3.0), torch.randint(size, (rows,), generator=generator)


SIZES = st.sampled_from([1, 2, 127, 128, 129, 4095, 4096, 4097, 9001]) | st.integers(1, 9000)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    rows=st.integers(1, 4),
    size=SIZES,
    count=st.integers(0, 22) | st.just(10_000),
    values=st.sampled_from([1, 3, 100, 1 << 24]),
    banned=st.sampled_from([0.0, 0.0, 0.3, 0.9999]),
)
def test_any_rows(seed: int, rows: int, size: int, count: int, values: int, banned: float) -> None:
    compare(*make(seed, rows, size, values, banned), count)


def test_groups_that_tie_are_taken_in_order() -> None:
    """The likeliest lie in as many groups as there are, all in one, at either side of a border, or on either of 0."""
    logits = torch.full((4, 5000), -1.0)
    logits[0, 7::128] = 2.0
    logits[1, 640:700] = torch.arange(60) % 3
    logits[2, 126:130] = logits[2, 4094:4098] = 1.0
    logits[3, 5::2], logits[3, 6::2] = -0.0, 0.0
    for count in (1, 8, 20, 21):
        compare(logits, torch.tensor([135, 641, 4096, 7]), count)


def test_a_row_has_the_same_bits_beside_any_others_and_with_any_count() -> None:
    logits, chosen = make(1, 3, 4500, 1 << 24, 0.01)
    integers, values = run(logits, chosen, 4500)
    for count in (0, 1, 5, 20, 21):
        for part in (slice(0, 1), slice(1, 3), slice(0, 3)):
            some = run(logits[part], chosen[part], count)
            assert torch.equal(some[0], integers[part, : 1 + count])
            assert torch.equal(some[1], values[part, : 1 + count])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_neither_the_type_of_logits_nor_where_they_lie_changes_bits(dtype: torch.dtype) -> None:
    logits, chosen = make(2, 3, 5003, 1 << 24, 0.0)
    logits = logits.to(dtype)
    expected = run(logits.float(), chosen, 5)
    padded = torch.full((4, 5111), 7.0, dtype=dtype, device=DEVICE)
    padded[1:, 1:5004] = logits.to(DEVICE)
    for same in (logits, padded[1:, 1:5004]):
        found = run(same, chosen.int(), 5)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_rows_that_are_two_billion_elements_apart(tmp_path: Path) -> None:
    size, stride = 300, (1 << 30) + 8
    if NATIVE:
        if torch.cuda.mem_get_info()[0] < 6 << 30:
            pytest.skip("needs 6 GiB of device memory")
        memory = torch.empty(2 * stride + size, dtype=torch.float16, device=DEVICE)
    else:  # of a sparse file only what is used takes memory
        memory = torch.from_numpy(np.memmap(tmp_path / "logits", np.float16, "w+", shape=(2 * stride + size,)))
    logits = memory.as_strided((3, size), (stride, 1))
    made, chosen = make(3, 3, size, 50, 0.0)
    logits.copy_(made)
    near = run(logits.contiguous(), chosen, 4)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run(logits, chosen, 4), near, strict=True))


def test_the_likely_stay_exact_among_large_logits() -> None:
    """A probability of almost 1, which is not lost in the rounding of logits."""
    logits = torch.full((1, 5000), 1000.0)
    logits[0, 4500] += 18.0
    _, values = run(logits, torch.tensor([4500]), 1)
    expected = -math.log1p(4999 * math.exp(-18.0))
    assert values.tolist()[0] == pytest.approx([expected, expected], rel=1e-4)


def test_broken_rows_leave_the_others_alone() -> None:
    logits, chosen = make(4, 5, 5000, 100, 0.0)
    expected = run(logits, chosen, 5)
    logits[0, 17], logits[1, 4400], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[1, 3] = -torch.nan
    integers, values = run(logits, chosen, 5)
    for row in (2, 4):
        assert torch.equal(integers[row], expected[0][row])
        assert torch.equal(values[row], expected[1][row])
    assert bool(((integers[:, 1:] >= 0) & (integers[:, 1:] < 5000)).all())
