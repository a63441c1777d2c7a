"""Token counts over prompts, completions and turns."""

from __future__ import annotations

import msgspec

from quire.server.generation.usage import UsageCounter
from quire.server.openai.usage import usage_of
from quire.types.outputs import CompletionOutput, RequestOutput


def output(
    request_id: str,
    index: int,
    num_tokens: int,
    *,
    cached: int | None = None,
    thoughts: int = 0,
    predicted: tuple[int, int] = (0, 0),
) -> RequestOutput:
    accepted, rejected = predicted
    completion = CompletionOutput(
        index,
        "",
        [1] * num_tokens,
        num_reasoning_tokens=thoughts,
        num_accepted_predictions=accepted,
        num_rejected_predictions=rejected,
    )
    return RequestOutput(request_id, None, [0] * 10, [completion], False, num_cached_tokens=cached)


def test_a_prompt_counts_once_and_its_completions_add_up() -> None:
    counter = UsageCounter()
    counter.add_prompt(output("a", 0, 5))
    assert (counter.prompt_tokens, counter.completion_tokens) == (10, 0)
    for told in (output("a", 0, 2, cached=4, thoughts=1), output("a", 0, 3, cached=4, thoughts=3), output("a", 1, 1)):
        counter.add(told)
    counter.add(output("b", 0, 7, cached=8, thoughts=2))  # another prompt, or the next turn
    usage = usage_of(counter)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 13, 33)
    assert usage.prompt_tokens_details.cached_tokens == 0 + 8
    assert usage.completion_tokens_details.reasoning_tokens == 3 + 2


def test_tokens_that_only_lacked_a_state_are_told_where_there_are_some() -> None:
    counter = UsageCounter()
    told = output("a", 0, 1, cached=16)
    counter.add(told)
    details = "prompt_tokens_details"
    assert msgspec.to_builtins(usage_of(counter))[details] == {"cached_tokens": 16}
    metrics = msgspec.structs.replace(told.metrics, num_without_state=48)
    counter.add(msgspec.structs.replace(told, metrics=metrics))
    assert msgspec.to_builtins(usage_of(counter))[details] == {"cached_tokens": 16, "no_state_tokens": 48}


def test_predicted_tokens_are_told_of_requests_with_a_prediction() -> None:
    told = (
        output("a", 0, 3, predicted=(2, 1)),
        output("a", 1, 1),
        output("a", 0, 4, predicted=(5, 2)),
        output("b", 0, 2, predicted=(1, 4)),
    )
    found = {}
    for has_prediction in (False, True):
        counter = UsageCounter(has_prediction=has_prediction)
        for one in told:
            counter.add(one)
        found[has_prediction] = msgspec.to_builtins(usage_of(counter))["completion_tokens_details"]
    assert found[False] == {"reasoning_tokens": 0}
    assert found[True] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 5 + 1,
        "rejected_prediction_tokens": 2 + 4,
    }
    unused = msgspec.to_builtins(usage_of(UsageCounter(has_prediction=True)))["completion_tokens_details"]
    assert unused == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
