from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.gumbel import (
    DOMAIN,
    LN2,
    LOG_COEFFICIENTS,
    gumbel_from_words,
    gumbel_noise,
    natural_log,
)
from tests.ops.test_philox import numpy_philox

F32 = np.float32


def numpy_log(x: np.ndarray, minus_v: np.ndarray | None = None) -> np.ndarray:
    """The specified logarithm, one float32 operation at a time."""
    shifted = x.astype(F32).view(np.int32) - np.int32(0x3F3504F3)
    exponent = shifted >> 23
    f = ((shifted & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(F32) - F32(1)
    if minus_v is not None:
        f = np.where(exponent == 0, minus_v, f)
    q = np.full_like(f, F32(LOG_COEFFICIENTS[-1]))
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        q = q * f
        q = q + F32(coefficient)
    return ((q * f) * f + f) + exponent.astype(F32) * F32(LN2)


def numpy_gumbel(words: np.ndarray) -> np.ndarray:
    v = (words.astype(np.uint32).astype(F32) + F32(0.5)) * F32(2.0**-32)
    u = np.maximum(F32(1) - v, F32(2.0**-25))
    return -numpy_log(-numpy_log(u, -v))


def numpy_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Noise of one row, from the specification."""
    ids = np.arange(vocab_size)
    shape = np.ones_like(ids)
    seed, position = seed % 2**64, position % 2**64
    counter = [ids // 4, shape * (position % 2**32), shape * (position >> 32), shape * DOMAIN]
    words = np.stack(numpy_philox(counter, [shape * (seed % 2**32), shape * (seed >> 32)]))
    return numpy_gumbel(words[ids % 4, ids])


def some_words() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    edges = [torch.arange(0, 70_000), torch.arange(2**32 - 70_000, 2**32)]
    return torch.cat([*edges, torch.randint(0, 2**32, (300_000,), generator=generator)])


def test_constants_are_exact_in_float32() -> None:
    for constant in (*LOG_COEFFICIENTS, LN2):
        assert float(F32(constant)) == constant
    assert F32(math.log(2)) == F32(LN2)


def test_coefficients_are_the_minimax_fit() -> None:
    low, high, nodes = math.sqrt(0.5) - 1, math.sqrt(2) - 1, 400
    f = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(nodes) + 0.5) / nodes)
    target = np.where(np.abs(f) < 1e-3, -0.5 + f / 3 - f**2 / 4 + f**3 / 5, (np.log1p(f) - f) / f**2)
    powers = np.vander(f, len(LOG_COEFFICIENTS), increasing=True)
    weights = np.ones(nodes)
    for _ in range(60):
        scale = np.sqrt(weights) * np.abs(f)
        fit = np.linalg.lstsq(powers * scale[:, None], target * scale, rcond=None)[0]
        weights *= np.abs(powers @ fit - target) * np.abs(f)
        weights /= weights.mean()
    np.testing.assert_allclose(fit, LOG_COEFFICIENTS, rtol=3e-6)


def test_log_is_accurate() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.rand(400_000, generator=generator) * 45 - 35)
    near_one = 1 + (torch.rand(100_000, generator=generator) - 0.5) * 1e-3
    x = torch.cat([spread, near_one, torch.tensor([2.0**-33, 17.4, math.sqrt(0.5), math.sqrt(2.0)])])
    exact = x.double().log()
    error = (natural_log(x).double() - exact).abs()
    assert bool((error <= 3e-7 * exact.abs()).all())
    assert natural_log(torch.tensor([1.0])).item() == 0.0


def test_log_is_bit_for_bit_the_specification() -> None:
    x = torch.exp2(torch.rand(200_000, generator=torch.Generator().manual_seed(2)) * 45 - 35)
    assert np.array_equal(natural_log(x).numpy(), numpy_log(x.numpy()))


def test_gumbel_is_bit_for_bit_the_specification() -> None:
    words = some_words()
    assert np.array_equal(gumbel_from_words(words).numpy(), numpy_gumbel(words.numpy()))


def test_gumbel_is_accurate_where_it_can_win() -> None:
    words = some_words()
    v = (words.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-v))
    low = v < 0.5
    assert float((gumbel_from_words(words).double() - exact)[low].abs().max()) < 3e-6


def test_extremes_are_finite_and_bound_everything() -> None:
    first, last = gumbel_from_words(torch.tensor([0, 2**32 - 1])).tolist()
    assert first == pytest.approx(33 * math.log(2), abs=1e-5)
    assert last == pytest.approx(-math.log(25 * math.log(2)), abs=1e-5)
    noise = gumbel_from_words(some_words())
    assert bool(noise.isfinite().all())
    assert float(noise.max()) == first
    assert float(noise.min()) == last


def test_gumbel_falls_as_the_word_grows() -> None:
    words = some_words().sort().values
    noise = gumbel_from_words(words).double()
    # A larger word may only gain by the error of two logarithms.
    assert float((noise[1:] - noise[:-1]).max()) < 5e-6
    assert torch.equal(
        gumbel_from_words(words[::7000]).sort(descending=True).values, gumbel_from_words(words[::7000])
    )


SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.one_of(st.integers(0, 5000), st.integers(0, 2**63 - 1))


@given(SEEDS, POSITIONS, st.integers(1, 70))
def test_noise_follows_the_keying(seed: int, position: int, vocab_size: int) -> None:
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab_size)
    assert noise.dtype == torch.float32
    assert noise.shape == (1, vocab_size)
    assert np.array_equal(noise[0].numpy(), numpy_noise(seed, position, vocab_size))


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=5), st.integers(1, 70))
def test_noise_of_a_row_stands_alone(rows: list[tuple[int, int]], vocab_size: int) -> None:
    seeds, positions = torch.tensor([seed for seed, _ in rows]), torch.tensor([position for _, position in rows])
    noise = gumbel_noise(seeds, positions, vocab_size)
    for index in range(len(rows)):
        alone = gumbel_noise(seeds[index : index + 1], positions[index : index + 1], vocab_size)
        assert torch.equal(noise[index : index + 1], alone)
        assert torch.equal(alone[:, :1], gumbel_noise(seeds[index : index + 1], positions[index : index + 1], 1))


def test_noise_has_the_moments_of_a_gumbel() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20) * 3, 20_000).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    ordered = noise.flatten().sort().values
    expected = torch.exp(-torch.exp(-ordered))
    empirical = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert float((expected - empirical).abs().max()) < 1.95 / math.sqrt(len(ordered))  # Kolmogorov, 0.1 %
