"""Repetition detection: against its definition, and as one of the ways in which a request ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sched.repetition import RepetitionDetector
from quire.types.sampling import RepetitionDetectionParams, SamplingParams
from tests.fakes import ScriptedDrafter
from tests.sched.driver import Driver, make_request
from tests.sched.test_update import answer

DETECTIONS = st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(2, 4)).map(
    lambda sizes: RepetitionDetectionParams(
        max_pattern_size=sizes[0], min_pattern_size=min(sizes[:2]), min_count=sizes[2]
    )
)


def repeats(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """The definition: the tokens end in one pattern, so many times in a row."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if len(tokens) >= length and list(tokens[-length:]) == list(tokens[-size:]) * params.min_count:
            return True
    return False


@given(DETECTIONS, st.lists(st.integers(0, 2), max_size=60))
def test_finds_what_the_definition_finds(params: RepetitionDetectionParams, tokens: list[int]) -> None:
    detector = RepetitionDetector(params)
    found = [detector.add(token) for token in tokens]
    assert found == [repeats(tokens[: end + 1], params) for end in range(len(tokens))]


def test_what_is_remembered_does_not_grow_with_the_output() -> None:
    detector = RepetitionDetector(RepetitionDetectionParams(max_pattern_size=8, min_count=2))
    for token in range(10_000):
        assert not detector.add(token % 97)
    assert len(detector._last) == 8
    assert sum(map(len, detector._places.values())) == 8


DETECT = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=2)


@pytest.mark.parametrize(
    ("params", "tokens", "ending"),
    [
        ({}, [1, 2, 1, 2], "repetition"),
        ({}, [7, 7, 7, 7], "repetition"),
        ({}, [5, 1, 2, 3, 1, 2, 3], "repetition"),
        ({"min_tokens": 6}, [1, 2, 1, 2, 1, 2], "repetition"),
        ({"stop_token_ids": (4,)}, [3, 4], "stop"),
        ({}, [1, 2, 3, 4, 5, 6, 7, 8], "length"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_an_output_that_repeats_itself_ends(
    params: dict[str, object], tokens: list[int], ending: str, together: bool
) -> None:
    sampling = SamplingParams(max_tokens=None, repetition_detection=DETECT, **params)  # type: ignore[arg-type]
    said = [*tokens, 9, 9][:8]
    driver = Driver(drafter=ScriptedDrafter(*said[:-1]) if together else None)
    driver.scheduler.add_request(make_request("a", [1, 2, 1], 8, sampling))  # the prompt does not count
    if together:
        output = answer(driver, [said])[0]
        assert output.token_ids == tokens
    else:
        outputs = [answer(driver, [[token]])[0] for token in tokens]
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(tokens) - 1)
        output = outputs[-1]
    assert output.finish_reason == ending
    assert not driver.scheduler.has_unfinished


def test_a_preempted_request_goes_on_looking() -> None:
    driver = Driver()
    sampling = SamplingParams(max_tokens=None, repetition_detection=DETECT)
    driver.scheduler.add_request(make_request("a", [5], 8, sampling))
    answer(driver, [[1]])
    answer(driver, [[2]])
    driver.preempt_last()
    answer(driver, [[1]])
    assert answer(driver, [[2]])[0].finish_reason == "repetition"
