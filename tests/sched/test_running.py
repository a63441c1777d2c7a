from __future__ import annotations

from tests.sched.driver import Driver, make_request


def test_a_lone_prompt_may_use_the_whole_budget() -> None:
    driver = Driver(budget=16, threshold=4)
    driver.add(make_request("a", range(20), 2))
    driver.run()
    assert [plan.num_tokens for plan in driver.plans] == [[16], [4], [1]]


def test_a_long_prompt_is_capped_while_others_run_and_they_keep_flowing() -> None:
    driver = Driver(budget=16, threshold=6)
    driver.add(make_request("short", [1], 8))
    driver.step()
    driver.add(make_request("long", range(20), 1), make_request("late", [2, 3], 1))
    driver.step()
    assert driver.plans[1].num_tokens == [1, 6, 2]
    driver.step()
    assert driver.plans[2].num_tokens == [1, 6]
    driver.run()
    assert len(driver.tokens("short")) == 8


def test_two_long_prompts_leave_room_for_running_and_short_requests() -> None:
    driver = Driver(budget=16, threshold=8, max_model_len=100, num_blocks=200)
    driver.add(make_request("a", range(60), 1), make_request("b", range(100, 160), 1))
    driver.step()
    driver.add(make_request("c", [1, 2, 3], 4), make_request("d", [4], 4))
    for _ in range(3):
        driver.step()
    assert [plan.num_tokens for plan in driver.plans] == [[8, 8], [8, 5, 3], [8, 6, 1, 1], [8, 6, 1, 1]]


def test_the_budget_bounds_a_step_of_decodes() -> None:
    driver = Driver(budget=3)
    driver.add(*(make_request(str(i), [i], 3) for i in range(5)))
    driver.run()
    assert max(sum(plan.num_tokens) for plan in driver.plans) == 3


def test_steps_in_flight_stop_at_the_certain_end() -> None:
    driver = Driver(depth=3)
    driver.add(make_request("a", [1, 2], 2))
    assert driver.plan() is not None
    assert driver.plan() is not None
    assert not driver.has_schedulable
    assert driver.plan() is None, "both tokens it may give are in flight"
    driver.run()
    assert len(driver.tokens("a")) == 2
    assert len(driver.plans) == 2
