"""Native sampling gives the references' bits: noise, ties, infinities and NaN, for any shape and any thread count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu import candidates, ops
from quire.ops.gumbel import gumbel_noise
from quire.ops.sample import first_max as expected_first_max
from quire.ops.sample import sample_within
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
    expected, expected_best = expected_first_max(scores)
    assert torch.equal(ids, expected)
    assert torch.equal(best, expected_best)
    assert torch.equal(strided, expected_first_max(scores[:, : size // 2 + 1])[0])


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


@examples(80)
@given(data=st.data(), rows=st.integers(1, 6), size=SIZES, isa=st.sampled_from(INSTRUCTION_SETS or [""]))
def test_draws_are_the_references(data: st.DataObject, rows: int, size: int, isa: str) -> None:
    """Any seeds, positions and limits; logits without a difference, with few values, and with any."""
    whole = st.integers(-(2**63), 2**63 - 1)
    seeds = torch.tensor(data.draw(st.lists(whole, min_size=rows, max_size=rows)))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, size, generator=generator) * data.draw(st.sampled_from([0.0, 0.3, 3.0, 12.0]))
    if data.draw(st.booleans()):
        logits = logits.round()
        logits[:, 1::3] = -torch.inf
    limits = st.tuples(
        st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
        st.sampled_from([-torch.inf, -0.1, -3.0, -40.0]),
        st.sampled_from([0, 1, 2, 50, size, 10**6]),
        st.sampled_from([1.0, 1e-9, 0.3, 0.9, 0.99999]),
    )
    chosen = data.draw(st.lists(limits, min_size=rows, max_size=rows))
    parameters = torch.tensor(chosen, dtype=torch.float64).T.contiguous()
    with using(isa, threads=data.draw(st.integers(1, 3))):
        tokens, highest = ops.sample_within(logits, parameters, seeds, positions)
    expected, expected_highest = sample_within(logits, parameters, seeds, positions)
    assert torch.equal(tokens, expected)
    assert torch.equal(highest, expected_highest)


@examples(80)
@given(data=st.data(), rows=st.integers(1, 6), size=SIZES, isa=st.sampled_from(INSTRUCTION_SETS or [""]))
def test_draws_among_the_offers_of_ranks(data: st.DataObject, rows: int, size: int, isa: str) -> None:
    """What each of several ranks offers of its slice of the vocabulary decides like all logits."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    seeds, positions = torch.randint(1 << 40, (2, rows), generator=generator)
    logits = torch.randn(rows, size, generator=generator) * data.draw(st.sampled_from([0.0, 0.3, 3.0, 12.0]))
    if data.draw(st.booleans()):
        logits = logits.round()
        logits[:, 1::3] = -torch.inf
    if data.draw(st.booleans()):
        logits[0, size // 2] = data.draw(st.sampled_from([torch.nan, torch.inf]))
    with_k = st.tuples(
        st.sampled_from([0.0, 0.1, 0.7, 5.0]),
        st.sampled_from([-torch.inf, -0.1, -3.0]),
        st.sampled_from([1, 2, 50, 64]),
        st.sampled_from([1.0, 1e-9, 0.3, 0.99999]),
    )
    without = st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.just(-torch.inf), st.just(0), st.just(1.0))
    chosen = data.draw(st.lists(st.one_of(with_k, without), min_size=rows, max_size=rows))
    sampled = torch.tensor(chosen, dtype=torch.float64).T.contiguous(), seeds, positions
    ranks = data.draw(st.integers(1, min(5, size)))
    share = -(-size // ranks)
    starts = range(0, size, share)
    with using(isa, threads=data.draw(st.integers(1, 3))):
        for count, of_rows in ((64, sampled), (1, None)):
            offers = [
                candidates.offer_candidates(logits[:, start : start + share], start, count, of_rows)
                for start in starts
            ]
            tokens, highest = candidates.sample_among(torch.cat(offers, dim=1), len(starts), of_rows)
            parameters = sampled[0] if of_rows is not None else torch.zeros(4, rows, dtype=torch.float64)
            expected, expected_highest = ops.sample_within(logits, parameters, seeds, positions)
            assert torch.equal(highest, expected_highest)
            sound = highest < torch.inf
            assert torch.equal(tokens[sound], expected[sound])
            assert ((tokens >= 0) & (tokens < size)).all()


def free(rows: int) -> Tensor:
    """Parameters of draws at temperature 1, without limits."""
    return torch.tensor([[1.0, -torch.inf, 0.0, 1.0]] * rows, dtype=torch.float64).T.contiguous()


@each_instruction_set
def test_every_bit_of_the_noise_counts(isa: str) -> None:
    """Against logits that are the negated noise but for one token, the draw must see exact zeros, and find it."""
    seeds, positions = torch.tensor([3, -5, 2**62 + 1]), torch.tensor([0, 1, 2**33])
    logits = -gumbel_noise(seeds, positions, 10001)
    logits[:, 777] += 1e-3
    with using(isa):
        assert ops.sample_within(logits, free(3), seeds, positions)[0].tolist() == [777, 777, 777]
        logits[:, 777] -= 2e-3
        assert ops.sample_within(logits, free(3), seeds, positions)[0].tolist() == [0, 0, 0]


@each_instruction_set
def test_a_token_with_much_noise_wins_from_far_below(isa: str) -> None:
    """No token is left out that could still win: here each row's luckiest token, just above what it needs."""
    seeds, positions, size = torch.arange(20), torch.arange(20) * 3, 50_000
    noise = gumbel_noise(seeds, positions, size)
    luckiest = noise.argmax(1)
    first = (luckiest == 0).long()
    logits = torch.full((20, size), -60.0)
    line = torch.arange(20)
    logits[line, first] = 0.0
    logits[line, luckiest] = noise[line, first] - noise[line, luckiest] + 1e-3
    with using(isa, threads=2):
        assert torch.equal(ops.sample_within(logits, free(20), seeds, positions)[0].long(), luckiest)
        logits[line, luckiest] -= 2e-3
        assert torch.equal(ops.sample_within(logits, free(20), seeds, positions)[0].long(), first)


@each_instruction_set
def test_rows_do_not_depend_on_the_batch(isa: str) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 3
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    parameters = free(64)
    parameters[2, ::3], parameters[3, ::2] = 40.0, 0.9
    with using(isa):
        whole = ops.sample_within(logits, parameters, seeds, positions)[0]
        for start, count in ((0, 1), (63, 1), (5, 7), (30, 33)):
            part = slice(start, start + count)
            found = ops.sample_within(logits[part], parameters[:, part], seeds[part], positions[part])[0]
            assert torch.equal(found, whole[part])
