"""Native sampling gives the references' bits: noise, ties, infinities and NaN, for any shape and any thread count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu import ops
from quire.ops import choice
from quire.ops.gumbel import gumbel_noise
from tests.kernels.cpu.isa import INSTRUCTION_SETS, each_instruction_set, examples, needs_library, using

pytestmark = needs_library
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([8191, 8192, 8193, 16384, 20001]))


@examples(80)
@given(data=st.data(), rows=st.integers(1, 9), size=SIZES, isa=st.sampled_from(INSTRUCTION_SETS or [""]))
def test_the_first_maximum(data: st.DataObject, rows: int, size: int, isa: str) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scores = torch.randint(-3, 4, (rows, size), generator=generator).float()
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    scores[0] = -torch.inf
    with using(isa, threads=data.draw(st.integers(1, 3))):
        ids, best = ops.first_max(scores)
        strided, _ = ops.first_max(scores[:, : size // 2 + 1])
    expected, expected_best = choice.first_max(scores)
    assert torch.equal(ids, expected)
    assert torch.equal(best, expected_best)
    assert torch.equal(strided, choice.first_max(scores[:, : size // 2 + 1])[0])


@each_instruction_set
@pytest.mark.parametrize("place", [0, 5, 8192, 8999])
def test_nan_is_reported(isa: str, place: int) -> None:
    scores = torch.zeros(3, 9000)
    scores[0, 17], scores[2, 30] = torch.inf, torch.inf
    scores[1, place] = torch.nan
    with using(isa):
        ids, best = ops.first_max(scores)
    assert best.isnan().tolist() == [False, True, False]
    assert ids.tolist() == [17, place, 30]


@examples(60)
@given(data=st.data(), rows=st.integers(1, 6), size=SIZES, isa=st.sampled_from(INSTRUCTION_SETS or [""]))
def test_draws_are_the_references_bit_for_bit(data: st.DataObject, rows: int, size: int, isa: str) -> None:
    whole = st.integers(-(2**63), 2**63 - 1)
    seeds = torch.tensor(data.draw(st.lists(whole, min_size=rows, max_size=rows)))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=rows, max_size=rows)))
    logits = torch.zeros(rows, size)
    if data.draw(st.booleans()):
        logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 3
        logits[:, ::3] = -torch.inf
        logits[:, 0] = 0
    with using(isa, threads=data.draw(st.integers(1, 3))):
        ids = ops.draw(logits, seeds, positions)
    assert torch.equal(ids, choice.draw(logits, seeds, positions))


@each_instruction_set
def test_every_bit_of_the_noise_counts(isa: str) -> None:
    """Against logits that are the negated noise but for one token, the draw must see exact zeros, and find it."""
    seeds, positions = torch.tensor([3, -5, 2**62 + 1]), torch.tensor([0, 1, 2**33])
    logits = -gumbel_noise(seeds, positions, 10001)
    logits[:, 777] += 1e-3
    with using(isa):
        assert ops.draw(logits, seeds, positions).tolist() == [777, 777, 777]
        logits[:, 777] -= 2e-3
        assert ops.draw(logits, seeds, positions).tolist() == [0, 0, 0]


@each_instruction_set
def test_rows_do_not_depend_on_the_batch(isa: str) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    with using(isa):
        whole = ops.draw(logits, seeds, positions)
        for start, count in ((0, 1), (63, 1), (5, 7), (30, 33)):
            part = slice(start, start + count)
            assert torch.equal(ops.draw(logits[part], seeds[part], positions[part]), whole[part])
