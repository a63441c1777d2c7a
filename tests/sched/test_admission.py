from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.types.errors import RequestError
from quire.types.sampling import PoolingParams, SamplingParams
from tests.fakes import pooled_sum
from tests.sched.driver import Driver, make_request


def refused(driver: Driver, match: str, field: str, *arguments: Any) -> None:
    with pytest.raises(RequestError, match=match) as error:
        driver.scheduler.add_request(make_request("x", *arguments))
    assert error.value.field == field
    assert not driver.scheduler.has_unfinished


def test_requests_that_could_never_run_are_refused_with_the_fix() -> None:
    driver = Driver(num_blocks=9, max_model_len=64)
    refused(driver, "empty prompt", "token_ids", [])
    refused(driver, "64 prompt tokens but max_model_len 64 takes 63", "token_ids", range(64))
    refused(driver, "max_tokens 0", "max_tokens", [1], 0)
    refused(
        driver, "33 tokens.* 9 KV blocks, but there are 8; .*max_model_len.*--kv-cache-memory", "max_tokens", [1], 33
    )
    refused(driver, "33 tokens", "token_ids", range(33), 1)


def test_the_largest_request_that_fits_runs() -> None:
    driver = Driver(num_blocks=9, max_model_len=64)
    driver.add(make_request("a", [1], 32, SamplingParams(max_tokens=None)))
    driver.run()
    assert len(driver.tokens("a")) == 32


def test_a_duplicate_id_is_refused_while_the_first_is_served() -> None:
    driver = Driver()
    driver.add(make_request("a", [1, 2]))
    with pytest.raises(RequestError, match="'a' is already being served"):
        driver.scheduler.add_request(make_request("a", [3]))
    driver.run()
    driver.add(make_request("a", [3]))
    driver.run()


def test_a_pooling_prompt_may_fill_the_context() -> None:
    driver = Driver(max_model_len=16)
    driver.add(make_request("a", range(16), params=PoolingParams()))
    driver.run()
    assert driver.outputs["a"][-1].pooled == pooled_sum(range(16))


def test_admission_is_in_order_and_waits_for_rows() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(*(make_request(name, [1, 2], 3) for name in "abc"))
    driver.step()
    assert [start.request_id for start in driver.plans[0].starts] == ["a", "b"]
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)
    driver.run()
    starts = [(start.request_id, start.row) for plan in driver.plans for start in plan.starts]
    assert starts == [("a", 0), ("b", 1), ("c", 1)]
    assert driver.plans[3].freed_rows == [0, 1]


def test_priority_decides_who_is_admitted() -> None:
    driver = Driver(max_num_seqs=1, policy="priority")
    driver.add(make_request("late", [1], 1, priority=5), make_request("soon", [1], 1, priority=-5))
    driver.run()
    assert [start.request_id for plan in driver.plans for start in plan.starts] == ["soon", "late"]


def test_a_prompt_that_would_not_fit_beside_the_running_ones_waits() -> None:
    driver = Driver(num_blocks=9, budget=8)
    driver.add(make_request("a", range(16), 8), make_request("b", range(50, 66), 8))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0, "b would have been admitted only to be preempted"
    assert len(driver.tokens("b")) == 8


def test_prompt_logprobs_compute_the_whole_prompt_despite_the_cache() -> None:
    driver = Driver()
    driver.add(make_request("a", range(12), 1))
    driver.run()
    driver.add(make_request("b", range(12), 1, SamplingParams(max_tokens=None, prompt_logprobs=1)))
    driver.run()
    output = driver.outputs["b"][0]
    assert output.num_cached_tokens == 0
    assert [entry.token_ids[0] for entry in output.prompt_logprobs or []] == list(range(1, 12))


def test_row_start_carries_what_the_worker_needs() -> None:
    driver = Driver()
    params = SamplingParams(max_tokens=None, temperature=0.5)
    driver.add(make_request("a", [4, 5], 2, params, seed=77, eos_token_ids=(9,)))
    driver.step()
    start = driver.plans[0].starts[0]
    assert (start.request_id, start.token_ids, start.num_prompt_tokens) == ("a", [4, 5], 2)
    assert (start.params, start.seed, start.eos_token_ids) == (params, 77, (9,))
    driver.step()
    assert start.token_ids == [4, 5], "a plan does not change after it is made"


def test_queue_time_runs_from_arrival_to_the_first_admission_only() -> None:
    driver = Driver(max_num_seqs=1)
    scheduler = driver.scheduler
    first, second = (
        msgspec.structs.replace(make_request(name, [1, 2], 2), arrival_time=10.0) for name in ("first", "second")
    )
    driver.add(first, second)
    clock = 10.5
    while scheduler.has_unfinished:
        plan = scheduler.schedule(clock)
        assert plan is not None
        driver.in_flight.append(plan)
        driver.finish()
        clock += 1
    told = {name: [output.queue_time for output in driver.outputs[name]] for name in ("first", "second")}
    assert told == {"first": [0.5, None], "second": [2.5, None]}


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "field", "message"),
    [
        (0, 8, "token_ids", "empty prompt"),
        (6, 8, "num_prompt_tokens", "num_prompt_tokens 6 but only 5 token_ids"),
        (3, 2, "token_ids", "has ended: it has 2 outputs already"),
    ],
)
def test_outputs_given_before_must_leave_a_prompt_and_room_for_more(
    num_prompt_tokens: int, max_tokens: int, field: str, message: str
) -> None:
    driver = Driver()
    with pytest.raises(RequestError, match=message) as caught:
        driver.add(make_request("a", range(5), max_tokens, num_prompt_tokens=num_prompt_tokens))
    assert caught.value.field == field
