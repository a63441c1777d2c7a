"""Steps for the stages of a pipeline: each has a part of the requests, and none is in two of them."""

from __future__ import annotations

from tests.sched.driver import Driver, make_request


def test_requests_that_decode_are_shared_evenly_by_the_stages() -> None:
    driver = Driver(depth=3, num_stages=3)
    driver.add(*(make_request(name, [1, 2, 3], 20) for name in "abcdefg"))
    driver.run()
    sizes = [len(plan.rows) for plan in driver.plans]
    assert sizes[0] == 7  # all prompts
    assert max(sizes[1:]) == 3
    assert sizes.count(3) > 20


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    driver = Driver(depth=3, num_stages=3, budget=8, max_model_len=64)
    driver.add(make_request("a", range(30), 3))
    for _ in range(3):
        driver.plan()
    assert [plan.num_tokens for plan in driver.in_flight] == [[8], [8], [8]]
    driver.run()
    assert len(driver.tokens("a")) == 3


def test_one_request_alone_waits_for_its_token() -> None:
    driver = Driver(depth=2, num_stages=2)
    driver.add(make_request("a", [1, 2, 3], 5))
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.run()
    assert len(driver.tokens("a")) == 5
