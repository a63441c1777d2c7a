from __future__ import annotations

from quire.kv.layout import LayerKV
from quire.types.sampling import SamplingParams
from tests.fakes import generate_alone
from tests.sched.driver import Driver, make_request


def preempted_names(driver: Driver) -> list[str]:
    """Who was started again, in order."""
    seen: set[str] = set()
    again = []
    for plan in driver.plans:
        for start in plan.starts:
            if start.request_id in seen:
                again.append(start.request_id)
            seen.add(start.request_id)
    return again


def test_the_latest_arrival_is_preempted_and_resumes_with_its_outputs() -> None:
    driver = Driver(num_blocks=9, max_model_len=33)
    requests = [make_request(name, [i] * 8, 16) for i, name in enumerate("abc")]
    driver.add(*requests[:2])
    driver.step()
    driver.add(requests[2])
    driver.run()
    assert "b" in preempted_names(driver)
    assert "a" not in preempted_names(driver)
    for request in requests:
        assert driver.ending(request.request_id) == generate_alone(request, 33)
    resumed = next(start for plan in driver.plans[1:] for start in plan.starts if start.request_id == "b")
    assert resumed.num_prompt_tokens == 8
    known = [*requests[1].token_ids, *driver.tokens("b")]
    assert 8 < len(resumed.token_ids) < 24
    assert resumed.token_ids == known[: len(resumed.token_ids)]


def test_the_worst_priority_is_preempted() -> None:
    driver = Driver(num_blocks=9, max_model_len=33, policy="priority")
    driver.add(make_request("bad", [1] * 8, 16, priority=9), make_request("good", [2] * 8, 16, priority=1))
    driver.run()
    assert set(preempted_names(driver)) == {"bad"}


def test_a_resumed_request_finds_its_own_blocks() -> None:
    driver = Driver(num_blocks=9, max_model_len=33)
    driver.add(make_request("a", [1] * 8, 16), make_request("b", [2] * 8, 16))
    driver.run()
    resumed = [start for plan in driver.plans[1:] for start in plan.starts if start.request_id == "b"]
    assert any(start.num_computed_tokens > 0 for start in resumed)
    assert driver.outputs["b"][0].num_cached_tokens == 0, "what it found of its own is no prefix hit"
    assert driver.scheduler.stats().prefix_hits == 0


def test_prompt_logprobs_are_given_out_once_across_a_preemption() -> None:
    params = SamplingParams(max_tokens=None, prompt_logprobs=0)
    for prefix_caching in (True, False):
        driver = Driver(num_blocks=9, max_model_len=33, budget=7, prefix_caching=prefix_caching)
        driver.add(make_request("a", [1] * 8, 16), make_request("b", range(8), 16, params))
        driver.run()
        assert "b" in preempted_names(driver)
        entries = [entry.token_ids[0] for output in driver.outputs["b"] for entry in output.prompt_logprobs or []]
        assert entries == list(range(1, 8))


def test_a_preempted_request_accepts_its_token_in_flight_and_waits_for_it() -> None:
    driver = Driver(depth=2)
    request = make_request("a", [1] * 7, 4)
    driver.add(request)
    driver.plan()
    driver.preempt_last()
    assert not driver.has_schedulable
    assert driver.plan() is None
    driver.finish()
    assert len(driver.tokens("a")) == 1
    resumed = driver.plan()
    assert resumed is not None
    assert resumed.starts[0].token_ids == [*request.token_ids, *driver.tokens("a")]
    driver.run()
    assert driver.ending("a") == generate_alone(request, 64)


def test_a_token_in_flight_may_end_a_preempted_request() -> None:
    driver = Driver(depth=2)
    driver.add(make_request("a", [1] * 7, 1), make_request("b", [1], 2))
    driver.plan()
    driver.preempt_last()
    driver.preempt_last()
    driver.finish()
    assert driver.ending("a") == generate_alone(make_request("a", [1] * 7, 1), 64)
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (0, 1)
    driver.run()


def test_a_chunk_in_flight_from_before_a_preemption_caches_nothing() -> None:
    driver = Driver(depth=2, budget=8)
    driver.add(make_request("a", range(20), 2))
    driver.plan()
    driver.preempt_last()
    again = driver.plan()
    assert again is not None
    assert again.starts[0].num_computed_tokens == 0
    driver.finish()
    assert not any(driver.kv._pools[0].pool.cached), "the blocks it holds now are written by the second step"
    driver.finish()
    assert len(driver.kv._pools[0].pool.cached[0]) == 2
    driver.run()


def test_a_row_that_is_preempted_while_it_is_planned_leaves_no_table_changes() -> None:
    layers = [LayerKV("full", None, 1), *[LayerKV("sliding", 4, 1)] * 2]
    driver = Driver(layers=layers, num_blocks=14)
    requests = [make_request("a", [1] * 8, 4), make_request("b", [2] * 8, 4)]
    driver.add(*requests)
    driver.step()
    assert driver.scheduler.stats().num_free_blocks == 1
    driver.step()  # both give back 2 blocks and need 3; a takes the one that is free
    assert preempted_names(driver) == []
    assert driver.scheduler.stats().num_preemptions == 1
    assert set(driver.plans[1].block_rows) == {0}
    driver.run()
    for request in requests:
        assert driver.ending(request.request_id) == generate_alone(request, 64)
