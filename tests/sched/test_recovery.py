from __future__ import annotations

import pytest

from tests.fakes import generate_alone
from tests.sched.driver import Driver, make_request


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_only_the_culprit_fails(depth: int, prefix_caching: bool) -> None:
    driver = Driver(depth=depth, prefix_caching=prefix_caching, budget=8)
    requests = [make_request(name, range(i, i + 11), 6) for i, name in enumerate("abcd")]
    driver.add(*requests)
    for _ in range(4):
        driver.step()
    driver.executor.poisoned = frozenset("c")
    driver.run()
    assert driver.outputs["c"][-1].finish_reason == "error"
    assert driver.outputs["c"][-1].error == "failed after the KV was written"
    for request in requests:
        if request.request_id != "c":
            assert driver.ending(request.request_id) == generate_alone(request, 64)


def test_after_a_failure_each_request_runs_alone_once_then_together() -> None:
    driver = Driver()
    driver.add(*(make_request(name, [1, 2, 3], 6) for name in "abc"))
    driver.step()
    driver.plan()
    driver.finish(fail=True)
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (0, 3)
    driver.add(make_request("new", [4], 2))
    for _ in range(4):
        driver.step()
    retries = driver.plans[2:5]
    assert [[start.request_id for start in plan.starts] for plan in retries] == [["a"], ["b"], ["c"]]
    assert [len(plan.rows) for plan in retries] == [1, 1, 1]
    assert len(driver.plans[5].rows) == 4
    driver.run()


def test_a_retry_runs_alone_up_to_the_point_of_failure() -> None:
    """Otherwise a culprit whose prompt takes several steps would be cleared by its first chunk, for ever."""
    driver = Driver(budget=4, prefix_caching=False)
    driver.add(make_request("long", range(10), 2))
    driver.step()
    driver.step()
    driver.add(make_request("other", [1], 4))
    driver.plan()
    assert len(driver.plans[2].rows) == 2
    driver.finish(fail=True)
    for _ in range(3):
        plan = driver.plan()
        assert plan is not None
        assert (plan.rows, driver.scheduler.state.in_flight[-1].retry) == ([0], True)
        assert driver.plan() is None, "nothing is planned beside a retry"
        assert not driver.has_schedulable
        driver.finish()
    driver.run()
    assert len(driver.tokens("long")) == 2


def test_a_retry_takes_room_from_others() -> None:
    driver = Driver(num_blocks=9, max_num_seqs=2, max_model_len=33, budget=40)
    requests = [make_request("a", [1] * 20, 8), make_request("b", [2] * 4, 8)]
    driver.add(*requests)
    driver.step()
    driver.plan()
    driver.finish(fail=True, apply_before_failing=True)
    driver.run()
    for request in requests:
        assert driver.ending(request.request_id) == generate_alone(request, 33)


def test_rows_freed_by_a_failed_plan_are_freed_again() -> None:
    driver = Driver()
    driver.add(make_request("done", [1], 1), make_request("stays", [2], 9))
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert plan.freed_rows == [0]
    driver.finish(fail=True)
    retry = driver.plan()
    assert retry is not None
    assert sorted(retry.freed_rows) == [0, 1]
    driver.finish()
    driver.run()


def test_fail_ends_a_step_without_retry() -> None:
    driver = Driver(depth=2)
    driver.add(make_request("a", [1], 9))
    plan = driver.plan()
    assert plan is not None
    driver.add(make_request("b", [2], 2))
    driver.plan()
    driver.in_flight.clear()
    outputs = driver.scheduler.fail(plan, "the device is on fire")
    driver.scheduler.check_integrity()
    assert [(output.request_id, output.finish_reason, output.error) for output in outputs] == [
        ("a", "error", "the device is on fire")
    ]
    driver.run()
    assert len(driver.tokens("b")) == 2


def test_abort_during_recovery() -> None:
    driver = Driver()
    driver.add(make_request("a", [1], 9), make_request("b", [2], 2))
    driver.step()
    driver.plan()
    driver.finish(fail=True)
    driver.abort("a")
    driver.run()
    assert driver.ending("b")[1] == "length"
