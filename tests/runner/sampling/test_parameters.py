"""The parameters of rows, as the draw within limits takes them."""

from __future__ import annotations

import math

import pytest

from quire.runner.sampling.parameters import sampling_parameters
from quire.types.sampling import SamplingParams


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0.5, min_p=0.1, top_k=7, top_p=0.9), (0.5, math.log(0.1), 7, 0.9)),
        (SamplingParams(temperature=1.0, top_k=1000), (1.0, -math.inf, 0, 1.0)),  # of the whole vocabulary: none
        (SamplingParams(temperature=0.0, top_p=0.5), (0.0, -math.inf, 0, 1.0)),
    ],
)
def test_what_a_row_is_drawn_by(params: SamplingParams, expected: tuple[float, ...]) -> None:
    assert sampling_parameters(params, 1000) == expected
