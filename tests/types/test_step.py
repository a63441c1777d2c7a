"""Requests, plans and results survive the way to another process and back."""

from __future__ import annotations

import msgspec
import pytest

from quire.types.messages import AbortRequests, Command, EngineInfo, FromEngine, Reply, ToEngine
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.step import RowStart, StepPlan, StepResult, TokenLogprobs

PLAN = StepPlan(
    3,
    rows=[1, 0],
    num_tokens=[4, 1],
    freed_rows=[2],
    starts=[RowStart(1, "a", [5, 6, 7, 8], 4, 0, SamplingParams(seed=1), (1 << 64) - 1, (2,))],
    block_rows=[1],
    block_groups=[0],
    block_indices=[0],
    block_ids=[9],
    draft_token_ids={0: [7, 7]},
    mask_slots={1: 0},
)
RESULT = StepResult(3, [[5], []], logprobs={0: [TokenLogprobs([5, 1], [-0.5, -1.0], 1)]}, errors={1: "NaN"})
REQUEST = EngineRequest(
    request_id="a",
    token_ids=[1, 2],
    params=PoolingParams(),
    num_prompt_tokens=1,
    seed=1 << 63,
    cache_salt="s",
)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (PLAN, StepPlan),
        (RESULT, StepResult),
        (REQUEST, ToEngine),
        (AbortRequests(["a"]), ToEngine),
        (Command(3, "verb", [1, "a", b"b"]), ToEngine),
        (Reply(3, {"a": 1}), FromEngine),
        (Reply(4, error="no"), FromEngine),
        (EngineInfo(1, 2, 3, 4, 5), EngineInfo),
        (EngineOutputs([EngineOutput("a", [1], "stop", error="x")], EngineStats(1)), EngineOutputs),
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip(value: object, kind: type) -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    assert again == value
    assert type(again) is type(value)


def test_defaults_are_not_shared_between_plans() -> None:
    StepPlan(1, [], []).starts.append(PLAN.starts[0])
    assert StepPlan(2, [], []).starts == []


def test_a_steady_output_is_small() -> None:
    """It is sent for every token of every request."""
    assert len(msgspec.msgpack.encode(EngineOutput("abcdefgh", [50_000]))) < 32
