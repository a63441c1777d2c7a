"""Prompts of bidirectional models: each in one step; short ones pass long ones, which wait for one step at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.sched.shares import WholePrompts
from quire.types.sampling import PoolingParams
from tests.fakes import pooled_sum
from tests.sched.driver import Driver, make_request

BUDGET = 64


def pooling_driver(**settings: int) -> Driver:
    return Driver(budget=BUDGET, max_model_len=BUDGET, prefix_caching=False, shares=WholePrompts(), **settings)


def started(driver: Driver) -> list[list[str]]:
    return [[start.request_id for start in plan.starts] for plan in driver.plans]


def test_a_short_prompt_passes_one_that_does_not_fit() -> None:
    driver = pooling_driver()
    sizes = {"a": 40, "long": 60, "b": 20, "c": 10, "d": 4}
    driver.add(*(make_request(name, range(size), params=PoolingParams()) for name, size in sizes.items()))
    driver.run()
    assert started(driver)[:2] == [["a", "b", "d"], ["long"]]
    assert [name for names in started(driver) for name in names] == ["a", "b", "d", "long", "c"]


def test_a_long_prompt_is_first_in_the_next_step_whatever_comes() -> None:
    driver = pooling_driver()
    driver.add(make_request("first", range(8), params=PoolingParams()))
    driver.add(make_request("long", range(BUDGET), params=PoolingParams()))
    for number in range(5):
        driver.add(make_request(f"short{number}", range(8), params=PoolingParams()))
        driver.step()
    assert started(driver)[1] == ["long"]


@given(
    st.lists(st.tuples(st.integers(1, BUDGET), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 2),
    st.sampled_from([17, 24, 64]),
    st.integers(1, 8),
)
def test_any_load_is_computed_whole(load: list[tuple[int, int]], depth: int, num_blocks: int, rows: int) -> None:
    driver = pooling_driver(depth=depth, num_blocks=num_blocks, max_num_seqs=rows)
    for number, (size, steps) in enumerate(load):
        driver.add(make_request(str(number), range(number, number + size), params=PoolingParams()))
        for _ in range(steps):
            if driver.scheduler.has_unfinished:
                driver.step()
    driver.run()
    sizes = {str(number): size for number, (size, _) in enumerate(load)}
    for plan in driver.plans:
        assert sum(plan.num_tokens) <= BUDGET
        names = {start.row: start.request_id for start in plan.starts}
        assert [names[row] for row in plan.rows] == list(names.values()), "a row runs in the step that starts it only"
        assert [sizes[names[row]] for row in plan.rows] == list(plan.num_tokens)
    for name, size in sizes.items():
        assert driver.outputs[name][-1].pooled == pooled_sum(range(int(name), int(name) + size))
    order = [int(name) for plan in driver.plans for name in (start.request_id for start in plan.starts)]
    assert sorted(order) == list(range(len(load))), "each starts once: none is preempted"
