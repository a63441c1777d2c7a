"""Steps for the stages of a pipeline: each has a part of the requests, and none waits for the step before it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource
from tests.fakes import FakeDrafter, generate_alone
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


@pytest.mark.parametrize("num_stages", [2, 3])
def test_one_request_alone_is_in_every_step_in_flight(num_stages: int) -> None:
    driver = Driver(depth=num_stages + 1, num_stages=num_stages)
    driver.add(make_request("a", [1, 2, 3], 5))
    for _ in range(num_stages + 1):
        assert driver.plan() is not None
    driver.run()
    assert [plan.num_tokens for plan in driver.plans] == [[3], [1], [1], [1], [1]]
    assert len(driver.tokens("a")) == 5


@pytest.mark.parametrize(("num_requests", "num_stages"), [(2, 2), (3, 2), (5, 2), (3, 3), (7, 3)])
def test_no_step_waits_for_tokens_of_those_that_other_stages_compute(num_requests: int, num_stages: int) -> None:
    driver = Driver(depth=num_stages + 1, num_stages=num_stages)
    driver.add(*(make_request(str(name), [name], 12) for name in range(num_requests)))
    driver.run()
    decodes = driver.plans[1:]
    for index, plan in enumerate(decodes):
        before = [row for other in decodes[max(0, index - num_stages + 1) : index] for row in other.rows]
        assert not {*plan.rows} & {*before}, (index, plan.rows, before)


def test_requests_whose_last_token_is_planned_leave_their_share_to_others() -> None:
    driver = Driver(depth=3, num_stages=2)
    driver.add(make_request("short", [1], 2), make_request("long", [2], 9))
    plans = [driver.plan() for _ in range(4)]
    assert [plan and len(plan.rows) for plan in plans] == [2, 1, 1, 1]
    driver.run()
    assert (len(driver.tokens("short")), len(driver.tokens("long"))) == (2, 9)


@pytest.mark.parametrize("what", ["drafts", "a mask"])
def test_a_request_with_drafts_or_masks_waits_for_its_token(what: str) -> None:
    drafter = FakeDrafter(0.5, 3, 0) if what == "drafts" else None
    driver = Driver(depth=3, num_stages=2, drafter=drafter)
    extra: dict[str, Any] = {"grammar": GrammarSource("regex", "a*")} if what == "a mask" else {}
    driver.add(make_request("a", [1, 2, 3], 5, **extra))
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.run()
    assert len(driver.tokens("a")) == 5


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("failing", [None, 1, 2, 4, 7])
def test_rows_that_end_and_a_failed_step_among_several_in_flight_change_no_token(
    num_stages: int, failing: int | None
) -> None:
    """One ends with a token that is not known when the next steps are planned."""
    jobs = [make_request(name, [3, index], 20) for index, name in enumerate("abc")]
    stop = generate_alone(jobs[1], 64)[0][4]
    jobs[1] = make_request("b", [3, 1], 20, SamplingParams(max_tokens=None, stop_token_ids=(stop,)))
    driver = Driver(depth=num_stages + 1, num_stages=num_stages, max_num_seqs=2)
    driver.add(*jobs)
    count, most = 0, 0
    while driver.scheduler.has_unfinished:
        while len(driver.in_flight) < driver.depth and driver.plan() is not None:
            pass
        most = max(most, len(driver.in_flight))
        driver.finish(fail=count == failing)
        count += 1
    assert most == num_stages + 1
    assert [driver.ending(job.request_id) for job in jobs] == [generate_alone(job, 64) for job in jobs]
