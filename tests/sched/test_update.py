from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.types.outputs import EngineOutput
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.status import BAD_LOGITS, MESSAGES, NO_TOKEN
from quire.types.step import StepResult, TokenLogprobs
from quire.types.structured import GrammarSource
from tests.fakes import ScriptedDrafter, pooled_sum
from tests.sched.driver import Driver, make_request


def answer(driver: Driver, tokens: list[list[int]], **columns: Any) -> list[EngineOutput]:
    """Plan a step and answer it by hand."""
    plan = driver.scheduler.schedule()
    assert plan is not None
    outputs = driver.scheduler.update(plan, StepResult(plan.step_id, tokens, **columns))
    driver.scheduler.check_integrity()
    return outputs


def sampling(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **settings)


@pytest.mark.parametrize(
    ("params", "tokens", "ending"),
    [
        (sampling(), [8, 9], ("stop", None)),
        (sampling(stop_token_ids=(7,)), [8, 7], ("stop", 7)),
        (sampling(stop_token_ids=(9,)), [9], ("stop", 9)),
        (sampling(ignore_eos=True), [9, 9, 9, 9], ("length", None)),
        (sampling(ignore_eos=True, stop_token_ids=(9,)), [9], ("stop", 9)),
        (sampling(min_tokens=3), [9, 9, 9], ("stop", None)),
        (sampling(min_tokens=2, stop_token_ids=(7,)), [7, 8, 7], ("stop", 7)),
        (sampling(), [1, 2, 3, 4], ("length", None)),
        (sampling(), [1, 2, 3, 9], ("stop", None)),
    ],
)
def test_endings(params: SamplingParams, tokens: list[int], ending: tuple[str, int | None]) -> None:
    driver = Driver()
    driver.scheduler.add_request(make_request("a", [1, 2], 4, params, eos_token_ids=(9,)))
    outputs = [answer(driver, [[token]])[0] for token in tokens]
    assert [output.token_ids for output in outputs] == [[token] for token in tokens], "the stop token is included"
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(tokens) - 1)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ending
    assert not driver.scheduler.has_unfinished


def test_the_context_length_ends_a_request() -> None:
    driver = Driver(max_model_len=6)
    driver.add(make_request("a", [1, 2, 3], 50))
    driver.run()
    assert len(driver.tokens("a")) == 3
    assert driver.ending("a")[1:] == ("length", None)


def test_several_tokens_are_cut_at_the_first_that_ends() -> None:
    drafter = ScriptedDrafter(3, 5)
    driver = Driver(drafter=drafter)
    driver.scheduler.add_request(make_request("a", [1], 9, sampling(stop_token_ids=(7,), logprobs=0)))
    logprobs = [TokenLogprobs([token], [0.0], 1) for token in (3, 4)]
    first = answer(driver, [[3, 4]], logprobs={0: logprobs})[0]
    assert (first.token_ids, first.finish_reason, first.logprobs) == ([3, 4], None, logprobs)
    drafter.drafts = [5, 7]
    logprobs = [TokenLogprobs([token], [0.0], 1) for token in (5, 7, 8)]
    last = answer(driver, [[5, 7, 8]], logprobs={0: logprobs})[0]
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([5, 7], "stop", 7)
    assert last.logprobs == logprobs[:2]


def test_tokens_past_a_stop_are_never_cached() -> None:
    driver = Driver(block_size=2, depth=3)
    request = make_request("a", [1], 9, sampling(stop_token_ids=(7,)))
    driver.scheduler.add_request(request)
    plans = [driver.scheduler.schedule() for _ in range(3)]
    for plan, token in zip(plans, (7, 8, 8), strict=True):
        assert plan is not None
        outputs = driver.scheduler.update(plan, StepResult(plan.step_id, [[token]]))
        assert len(outputs) == (token == 7), "results after the end are dropped"
        driver.scheduler.check_integrity()
    assert not any(driver.kv._pools[0].pool.cached), "[1, 7] was sampled, but 7 was computed by a step after the end"
    assert driver.kv.num_free_blocks == driver.kv.num_blocks


def test_a_row_error_ends_only_that_request() -> None:
    driver = Driver()
    driver.scheduler.add_request(make_request("a", [1], 2))
    driver.scheduler.add_request(make_request("b", [2], 2))
    bad, good = answer(driver, [[], [5]], errors={0: "NaN in the logits"})
    assert (bad.request_id, bad.finish_reason, bad.error) == ("a", "error", "NaN in the logits")
    assert (good.request_id, good.token_ids, good.finish_reason) == ("b", [5], None)
    assert driver.scheduler.num_running == 1


def test_a_row_that_gives_no_token_computes_its_last_one_again() -> None:
    driver = Driver()
    driver.scheduler.add_request(make_request("a", [1, 2, 3], 2))
    assert answer(driver, [[]]) == []
    assert answer(driver, [[5]])[0].token_ids == [5]
    assert answer(driver, [[]]) == []
    assert answer(driver, [[6]])[0].finish_reason == "length"


def test_a_row_that_gives_more_tokens_than_it_samples_fails_alone() -> None:
    driver = Driver()
    driver.scheduler.add_request(make_request("a", [1], 3))
    driver.scheduler.add_request(make_request("b", [1], 3))
    bad, good = answer(driver, [[5, 6], [5]])
    assert bad.error == "the step returned 2 tokens for it but had 0 drafts to verify"
    assert good.finish_reason is None


def test_a_pooling_row_without_a_result_is_an_error() -> None:
    driver = Driver()
    driver.scheduler.add_request(make_request("p", [1], params=PoolingParams()))
    assert answer(driver, [[]])[0].error == "the step returned no pooled output for it"


def test_pooling_ends_when_the_prompt_is_computed() -> None:
    driver = Driver(budget=4, depth=2)
    driver.add(make_request("p", range(10), params=PoolingParams()), make_request("a", [1], 3))
    driver.run()
    output = driver.outputs["p"][-1]
    assert (output.finish_reason, output.pooled, output.token_ids) == ("stop", pooled_sum(range(10)), [])
    assert len(driver.outputs["p"]) == 1


def test_abort_at_any_moment() -> None:
    driver = Driver(max_num_seqs=1, depth=2)
    driver.add(make_request("running", [1], 9), make_request("waiting", [2], 9), make_request("other", [3], 2))
    driver.plan()
    driver.plan()
    driver.abort("waiting", "running", "never seen")
    assert [driver.ending(name)[1] for name in ("running", "waiting")] == ["abort", "abort"]
    assert driver.outputs["running"][0].num_cached_tokens == 0
    assert driver.outputs["waiting"][0].num_cached_tokens == -1
    driver.run()
    assert driver.ending("other")[1] == "length"
    assert driver.tokens("running") == []
    driver.abort("running")


@pytest.mark.parametrize(
    ("params", "grammar", "field"),
    [
        (sampling(allowed_token_ids=(5,)), GrammarSource("regex", "abc"), "allowed_token_ids"),
        (sampling(allowed_token_ids=(9,), min_tokens=2), None, "allowed_token_ids"),
        (sampling(bad_words_token_ids=((5,),)), GrammarSource("regex", "a"), "bad_words"),
        (sampling(min_tokens=2), GrammarSource("json", "{}"), "min_tokens"),
        (sampling(), GrammarSource("json", "{}"), "structured_outputs.json"),
        (sampling(), None, None),
    ],
)
def test_constraints_that_leave_no_token_are_the_callers_mistake(
    params: SamplingParams, grammar: GrammarSource | None, field: str | None
) -> None:
    for status, expected in ((NO_TOKEN, field), (BAD_LOGITS, None)):
        driver = Driver()
        request = make_request("a", [1, 2], 4, params, eos_token_ids=(9,))
        driver.scheduler.add_request(msgspec.structs.replace(request, grammar=grammar))
        (output,) = answer(driver, [[]], errors={0: MESSAGES[status]})
        assert (output.finish_reason, output.error_field) == ("error", expected)
