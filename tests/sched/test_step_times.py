"""Predicted times follow what is measured, whatever was believed before, and few wild measurements change little."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sched.step_times import Prior, StepTimes, StepWork, pairs_of

TRUE = Prior(0.03, 0.001, 0.004, 2e-6)


def seconds(work: StepWork, true: Prior = TRUE) -> float:
    return true.fixed + true.per_row * work.rows + true.per_token * work.prompt_tokens + true.per_pair * work.pairs


def some_work(draw: random.Random) -> StepWork:
    tokens = draw.choice([0, 16, 64, 256])
    return StepWork(draw.randint(1, 16), tokens, pairs_of(draw.randint(0, 8000), tokens))


@pytest.mark.parametrize("factor", [0.02, 1.0, 50.0])
def test_it_learns_from_any_prior(factor: float) -> None:
    draw = random.Random(0)
    times = StepTimes(Prior(*(factor * value for value in Prior())))
    for _ in range(300):
        work = some_work(draw)
        times.measured(work, seconds(work) * draw.uniform(0.95, 1.05))
    for work in (StepWork(4), StepWork(8, 64, pairs_of(0, 64)), StepWork(8, 64, pairs_of(7000, 64))):
        assert times.of(work) == pytest.approx(seconds(work), rel=0.2)


def test_a_few_decodes_tell_the_speed_of_prompts_too() -> None:
    times, work = StepTimes(), StepWork(1, 256, pairs_of(0, 256))
    before = times.of(work)
    for _ in range(4):
        times.measured(StepWork(1), 100 * times.of(StepWork(1)))
    assert times.of(work) > 10 * before, "a model that decodes slowly computes prompts slowly"


def test_a_single_spike_is_not_believed_and_a_second_one_is() -> None:
    times, work = StepTimes(), StepWork(1, 64, pairs_of(100, 64))
    for _ in range(20):
        times.measured(work, 0.1)
    times.measured(work, 5.0)
    assert times.of(work) == pytest.approx(0.1, rel=0.01)
    times.measured(work, 0.1)
    times.measured(work, 5.0)
    times.measured(work, 5.0)
    assert times.of(work) > 0.15
    for _ in range(20):
        times.measured(work, 0.1)
    assert times.of(work) == pytest.approx(0.1, rel=0.05)


def test_the_old_is_forgotten() -> None:
    times, work = StepTimes(), StepWork(2, 64, pairs_of(1000, 64))
    for duration in (0.1, 0.3):
        for _ in range(30):
            times.measured(work, duration)
        assert times.of(work) == pytest.approx(duration, rel=0.02)


@given(
    st.integers(0, 64),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.floats(0.0, 1.0),
    st.sampled_from([(), (32, 64, 128, 256)]),
)
def test_what_fits_is_within_the_limit(
    rows: int, taken: int, start: int, limit: float, sizes: tuple[int, ...]
) -> None:
    times = StepTimes(sizes=sizes)
    work = StepWork(rows, taken, pairs_of(50, taken))
    count = times.fitting(work, start, limit)
    assert count >= 0
    if count:
        assert times.of(StepWork(rows, taken + count, work.pairs + pairs_of(start, count))) <= limit * (1 + 1e-9)
    if not sizes:
        more = StepWork(rows, taken + count + 1, work.pairs + pairs_of(start, count + 1))
        assert times.of(more) > limit * (1 - 1e-9), "one more would have fitted"


def test_padded_steps_are_filled() -> None:
    times = StepTimes(Prior(0.004, 5e-5, 2.5e-5, 1e-12), (32, 64, 128, 256, 512, 1024))
    work = StepWork(16)
    # 0.0145 s would take 388 tokens; they would be padded to 512, so 240 beside 16 rows are as fast as it gets.
    assert times.fitting(work, 0, 0.0145) == 240
    assert times.fitting(work, 0, 0.0180) == 496


def test_nothing_makes_a_prediction_zero_or_less() -> None:
    times = StepTimes()
    for _ in range(1000):
        times.measured(StepWork(1, 16, pairs_of(0, 16)), 1e-9)
    assert times.of(StepWork(0)) > 0
    assert times.fitting(StepWork(1), 0, 1.0) > 0


@given(
    rows=st.integers(0, 64),
    tokens=st.integers(0, 600),
    limit=st.floats(0.0, 2.0),
    wanted=st.integers(1, 3000),
    sizes=st.sampled_from([(), (16, 64, 256, 1024)]),
)
def test_no_more_tokens_fit_than_it_says(
    rows: int, tokens: int, limit: float, wanted: int, sizes: tuple[int, ...]
) -> None:
    """`most` may say too many, never too few: who waits is looked at only if that many tokens could fit."""
    times, work = StepTimes(TRUE, sizes), StepWork(rows, tokens, pairs_of(0, tokens))
    most = times.most(work, limit)
    assert most >= times.fitting(work, 0, limit)
    if times.of(times.plus(work, 0, wanted)) <= limit:
        assert most >= wanted


def test_parts_of_prompts_fill_tiles_of_attention() -> None:
    """With 100,000 tokens before them, 96 tokens take as long as 128: a step has all 128 or at most 64."""
    times = StepTimes(Prior(0.005, 2e-5, 1.85e-5, 1.48e-9), (32, 64, 128, 192, 256), tile=128)
    assert pairs_of(100_000, 96, 128) == pytest.approx(pairs_of(100_000, 128, 128), rel=1e-3)
    assert pairs_of(100_000, 129, 128) > 1.9 * pairs_of(100_000, 128, 128)
    assert [times.fitting(StepWork(16), 100_000, limit) for limit in (0.030, 0.025, 0.0225)] == [128, 64, 64]
    for limit in (0.012, 0.018, 0.0225, 0.030, 0.060):
        count = times.fitting(StepWork(16), 100_000, limit)
        assert times.of(times.plus(StepWork(16), 100_000, count)) <= limit
