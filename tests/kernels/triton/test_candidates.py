"""Sampling on logits that ranks share, against the ops' torch references and the draw from all logits."""

from __future__ import annotations

import pytest
import torch

from quire.ops import candidates as ops
from quire.ops.sample import sample_within
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.ops.inputs.candidates import generate_among, generate_offer

pytestmark = needs_triton


def placed(sampled: ops.SampledRows) -> ops.SampledRows:
    parameters, seeds, positions = sampled
    return parameters.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE)


@pytest.mark.parametrize("seed", [0, 1, 2, 7, 10])
def test_offers_are_the_references(seed: int) -> None:
    from quire.kernels.triton.candidates import offer_candidates

    logits, first_token, count, sampled = generate_offer(seed)
    expected = ops.offer_candidates(logits, first_token, count, sampled)
    on_device = None if sampled is None else placed(sampled)
    found = offer_candidates(logits.to(DEVICE), first_token, count, on_device).cpu()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 9])
def test_draws_among_offers_are_the_references(seed: int) -> None:
    from quire.kernels.triton.candidates import sample_among

    offers, ranks, sampled = generate_among(seed)
    on_device = None if sampled is None else placed(sampled)
    found, highest = sample_among(offers.to(DEVICE), ranks, on_device)
    expected, expected_highest = ops.sample_among(offers, ranks, sampled)
    assert found.tolist() == expected.tolist()
    assert highest.tolist() == expected_highest.tolist()


def test_ranks_draw_what_all_logits_give() -> None:
    """Slices that begin anywhere in a counter of the noise, rows of all kinds, and cuts among equal logits."""
    from quire.kernels.triton.candidates import offer_candidates, sample_among

    rows, size, ranks = 8, 9001, 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.round(torch.randn(rows, size, generator=generator) * 8) / 4
    logits[6, 8000] = torch.nan
    parameters = torch.tensor(
        [
            *((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 1, 1.0)),
            *((1.0, 64, 1.0), (0.9, 50, 0.5), (1.0, 5, 1.0), (2.0, 40, 0.01)),
        ],
        dtype=torch.float64,
    )
    columns = torch.stack([parameters[:, 0], torch.full((rows,), -torch.inf), parameters[:, 1], parameters[:, 2]])
    columns[1, 5] = -0.3
    sampled = columns.contiguous(), torch.arange(rows) * 977, torch.arange(rows)
    share = -(-size // ranks)
    on_device = placed(sampled)
    offers = [
        offer_candidates(logits[:, start : start + share].to(DEVICE), start, 64, on_device)
        for start in range(0, size, share)
    ]
    tokens, highest = sample_among(torch.cat(offers, dim=1), ranks, on_device)
    expected, expected_highest = sample_within(logits, *sampled)
    assert highest.tolist() == expected_highest.tolist()
    assert [token for row, token in enumerate(tokens.tolist()) if row != 6] == [
        token for row, token in enumerate(expected.tolist()) if row != 6
    ]
