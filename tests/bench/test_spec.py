"""`bench spec` over a fake engine: predictions are as right as asked, and answers are compared with plain ones."""

from __future__ import annotations

from operator import eq

import pytest

from quire.bench.spec import SpecOptions, SpecPoint, bench_spec, spec_chart, spec_grids
from quire.frontend.llm import LLM
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import FakeClient, text_model


def options(**changes: object) -> SpecOptions:
    given: dict[str, object] = {"batch_sizes": [1, 3], "acceptances": [0.0, 0.5, 1.0], "repeats": 2}
    return SpecOptions(**{"input_len": 8, "output_len": 9, **given, **changes})  # type: ignore[arg-type]


def test_predictions_are_as_right_as_asked() -> None:
    fake = FakeClient()
    said: list[str] = []
    points = bench_spec(LLM.from_client(fake, text_model()), options(), seed=0, say=said.append)
    assert [(point.batch_size, point.acceptance) for point in points] == [
        (size, share) for size in (1, 3) for share in (0.0, 0.5, 1.0)
    ]
    assert len(said) == len(points) == fake.num_idle_captures
    assert all(point.is_same and point.speedup > 0 for point in points)
    speculated = [r for r in fake.added if isinstance(r.params, SamplingParams) and r.params.speculate]
    plain = len(fake.added) - len(speculated)
    # One plain run of each batch size says what to predict, one with drafts at each point is not counted.
    assert (plain - (1 + 3), len(speculated) - 3 * (1 + 3)) == (2 * 3 * (1 + 3),) * 2, "the others take turns"
    # The fake says its prompt again.
    shares = [sum(map(eq, r.prediction, r.token_ids)) / len(r.token_ids) for r in speculated]
    assert shares[:3] + shares[6:9] == [0, 0, 0, 1, 1, 1]
    assert 0 < sum(shares[3:6]) < 3


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="--acceptances has 2"):
        options(acceptances=[2])
    with pytest.raises(ConfigError, match="--batch-sizes is 0"):
        options(batch_sizes=[0])


def test_the_picture_has_a_line_for_each_batch_size() -> None:
    points = [
        SpecPoint(
            batch_size=size,
            acceptance=share,
            plain_tokens_per_s=10,
            tokens_per_s=20,
            speedup=1 + share,
            num_accepted=3,
            num_rejected=1,
            is_same=True,
        )
        for size in (1, 8)
        for share in (0.0, 1.0)
    ]
    picture = spec_chart(points, "title")
    assert picture.count("<polyline") == 3, "and one where nothing is faster"
    assert "batch 8" in picture
    (grid,) = spec_grids(points)
    assert grid.rows[1] == ("1", "100%", "10.0", "20.0", "2.00 x", "3 of 4", "yes")
