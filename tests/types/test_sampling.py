"""SamplingParams: convenient to write, checked at once, and hashable data that crosses processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.types.errors import RequestError
from quire.types.sampling import PoolingParams, RepetitionDetectionParams, SamplingParams


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], bad_words=["a"], allowed_token_ids={5})
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("END",), (3, 4), ("a",))
    assert params.allowed_token_ids == (5,)
    assert SamplingParams(stop=None, bad_words=None).stop == ()
    assert SamplingParams().allowed_token_ids is None


def test_greedy_is_temperature_zero_or_nearly_so() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams(temperature=1e-3).greedy


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_pattern_size", {"max_pattern_size": -1, "min_count": 2}),
        ("max_pattern_size", {"max_pattern_size": 2049, "min_count": 2}),
        ("max_pattern_size", {"max_pattern_size": 2.5, "min_count": 2}),
        ("min_pattern_size", {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}),
        ("min_count", {"max_pattern_size": 3, "min_count": 1}),
        ("min_count", {"max_pattern_size": 3}),
    ],
)
def test_a_repetition_that_cannot_be_looked_for_is_named(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^repetition_detection.{field} is .* but must be ") as info:
        RepetitionDetectionParams(**values)
    assert info.value.field == f"repetition_detection.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", "two"),
        ("n", True),
        ("n", None),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", 1.5),
        ("max_tokens", "16"),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("bad_words", iter("a")),
        ("allowed_token_ids", 3),
        ("ignore_eos", "no"),
        ("logit_bias", [3]),
        ("logit_bias", {3: "much"}),
        ("structured_outputs", {"json": {}}),
        ("output_kind", "all"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 3.5e38),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("logit_bias", {3: -1e39}),
        ("truncation_side", "middle"),
        ("stream_interval", 0),
        ("stream_interval", None),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("stop", ["", "a"]),
        ("bad_words", [" "]),
        ("allowed_token_ids", []),
        ("logit_bias", {3: float("inf")}),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} is .* but must be ") as info:
        SamplingParams(**{field: value})
    assert info.value.field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"stop": ["x"], "detokenize": False}, "stop")],
)
def test_contradictions(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as info:
        SamplingParams(**values)
    assert info.value.field == field


def test_stop_strings_are_bounded() -> None:
    with pytest.raises(RequestError, match="stop holds 1025 strings; give at most 1024"):
        SamplingParams(stop=[f"end {index}" for index in range(1025)])


def test_params_cross_a_process_unchanged() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), logit_bias={1: 2.0}, seed=1 << 63, top_k=-1)
    packed = msgspec.msgpack.encode([params, PoolingParams(dimensions=3)])
    assert msgspec.msgpack.decode(packed, type=list[SamplingParams | PoolingParams]) == [
        params,
        PoolingParams(dimensions=3),
    ]
