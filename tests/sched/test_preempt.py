from __future__ import annotations

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


def test_a_preempted_request_waits_for_its_token_in_flight() -> None:
    driver = Driver(num_blocks=5, max_model_len=17, depth=2)
    a, b = make_request("a", [1] * 7, 8), make_request("b", [2] * 7, 2)
    driver.add(a)
    driver.plan()  # a computes 7 tokens in 2 blocks
    driver.add(b)
    driver.plan()  # a decodes; b would need 2 blocks and leave no spare one, so it waits
    driver.finish()
    driver.run()
    assert driver.ending("a") == generate_alone(a, 17)
    assert driver.ending("b") == generate_alone(b, 17)


def test_a_stop_token_in_flight_ends_a_preempted_request_in_the_queue() -> None:
    driver = Driver(num_blocks=8, max_model_len=29, depth=2)
    b = make_request("b", [2] * 8, 20)
    stop = generate_alone(b, 29)[0]
    b = make_request("b", [2] * 8, 20, SamplingParams(max_tokens=None, stop_token_ids=(stop[4],)))
    driver.add(make_request("a", [1] * 12, 16), b)
    while driver.scheduler.stats().num_preemptions == 0:
        if driver.plan() is None or len(driver.in_flight) > 2:
            driver.finish()
    driver.run()
    assert driver.ending("b") == generate_alone(b, 29)
