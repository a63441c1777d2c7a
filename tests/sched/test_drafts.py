"""Drafts: a step gives what holds and one token more; counts, blocks and streams are those of no speculation."""

from __future__ import annotations

import random

import pytest

from quire.kv.layout import LayerKV
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from tests.fakes import VOCAB_SIZE, FakeDrafter, ScriptedDrafter, generate_alone, next_token
from tests.sched.driver import Driver, make_request

WINDOW = [LayerKV("full", None, 1), *[LayerKV("sliding", 5, 1)] * 2]


def outputs_of(token_ids: list[int], count: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_that_hold_save_steps(depth: int) -> None:
    request = make_request("a", [1, 2, 3], 30)
    driver = Driver(drafter=FakeDrafter(1.0, 4, 0), depth=depth)
    driver.add(request)
    driver.run()
    assert driver.ending("a") == generate_alone(request, 64)
    assert driver.executor.num_steps < 20
    assert driver.executor.num_accepted > 12


def test_a_step_gives_the_drafts_that_hold_and_one_token_more() -> None:
    first = outputs_of([1, 2, 3], 4)
    wrong = (first[2] + 1) % VOCAB_SIZE
    driver = Driver(drafter=ScriptedDrafter(first[0], first[1], wrong, 9))
    driver.add(make_request("a", [1, 2, 3], 30))
    plan = driver.plan()
    assert plan is not None
    assert (plan.num_tokens, plan.draft_token_ids) == ([7], {0: [first[0], first[1], wrong, 9]})
    driver.finish()
    assert driver.tokens("a") == first[:3]
    again = driver.plan()
    assert again is not None
    assert again.num_tokens == [5]
    (request,) = driver.scheduler._state.running
    assert (request.num_certain_tokens, request.num_computed_tokens) == (5, 10)


def test_what_is_in_flight_counts_as_if_all_of_it_held() -> None:
    driver = Driver(drafter=ScriptedDrafter(VOCAB_SIZE, VOCAB_SIZE), depth=3)
    driver.add(make_request("a", [1, 2, 3], 30))
    (request,) = driver.scheduler._state.requests.values()
    seen = []
    for _ in range(3):
        driver.plan()
        seen.append((request.num_certain_tokens, request.num_computed_tokens, request.num_tokens))
    assert seen == [(0, 5, 6), (0, 8, 9), (0, 11, 12)]
    seen = []
    for _ in range(3):
        driver.finish()
        seen.append((request.num_certain_tokens, request.num_computed_tokens, request.num_tokens))
    assert seen == [(3, 9, 10), (4, 7, 8), (5, 5, 6)]
    assert driver.tokens("a") == outputs_of([1, 2, 3], 3)


@pytest.mark.parametrize(
    ("where", "params", "extra"),
    [
        (3, {"stop_token_ids": True}, {}),
        (3, {}, {"eos_token_ids": True}),
        (4, {}, {"max_tokens": 4}),
        (4, {"min_tokens": 4, "stop_token_ids": True}, {}),
    ],
)
def test_a_request_ends_inside_of_what_holds(where: int, params: dict[str, object], extra: dict[str, object]) -> None:
    prompt = [1, 2, 3]
    last = outputs_of(prompt, where)[-1]
    wanted = {name: (last,) if value is True else value for name, value in params.items()}
    fields = {name: (last,) if value is True else value for name, value in extra.items()}
    request = make_request(
        "a",
        prompt,
        **{"max_tokens": 20, "params": SamplingParams(max_tokens=None, logprobs=0, **wanted), **fields},  # type: ignore[arg-type]
    )
    driver = Driver(drafter=FakeDrafter(1.0, 8, 3), depth=2, block_size=2)
    driver.add(request)
    driver.run()
    assert driver.ending("a") == generate_alone(request, 64)
    assert len(driver.tokens("a")) == where
    assert sum(len(output.logprobs or []) for output in driver.outputs["a"]) == where


def test_drafts_that_do_not_hold_are_never_cached() -> None:
    driver = Driver(drafter=ScriptedDrafter(8, 8, 8), block_size=2)
    driver.add(make_request("a", [1, 2, 3], 4))
    driver.run()
    tokens = [1, 2, 3, *driver.tokens("a")]
    assert 8 not in tokens[3:], "the prompt was chosen for it"
    assert len(driver.kv._pools[0].pool.cached[0]) == (len(tokens) - 1) // 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_leave_a_window_only_when_no_result_can_bring_it_back(depth: int) -> None:
    """Were they to leave it by the upper bound, the fake would read null blocks."""
    request = make_request("a", range(9), 40)
    driver = Driver(
        layers=WINDOW, block_size=1, num_blocks=400, drafter=ScriptedDrafter(*[VOCAB_SIZE] * 7), depth=depth
    )
    driver.add(request)
    driver.run()
    assert driver.ending("a") == generate_alone(request, 64)
    assert driver.executor.num_accepted == 0


def test_a_request_waits_for_its_results_rather_than_lose_its_blocks() -> None:
    """Two chunks in flight hold more than a window, and a prompt that starts over would come to the same point."""
    driver = Driver(layers=[LayerKV("sliding", 4, 1)], num_blocks=1 + 4, budget=8, depth=2, max_model_len=64)
    request = make_request("a", range(30), 3)
    driver.add(request)
    driver.run()
    assert driver.ending("a") == generate_alone(request, 64)
    assert driver.scheduler.stats().num_preemptions == 0


def test_drafts_take_what_is_left() -> None:
    driver = Driver(drafter=ScriptedDrafter(*range(20)), budget=8, max_num_seqs=3)
    driver.add(
        make_request("a", [1], 30), make_request("b", [2], 3), make_request("p", [3, 4], params=PoolingParams())
    )
    plan = driver.plan()
    assert plan is not None
    assert sum(plan.num_tokens) == 8
    assert plan.draft_token_ids == {0: [0, 1, 2, 3]}, "then the budget is spent"
    driver.finish()
    driver.executor.stalling = 1.0
    plan = driver.plan()
    assert plan is not None
    assert list(map(len, plan.draft_token_ids.values())) == [6], "b needs its one token"
    driver.abort("a")
    driver.finish()
    plan = driver.plan()
    assert plan is not None
    assert list(map(len, plan.draft_token_ids.values())) == [1], "no more than max_tokens"
    driver.executor.stalling = 0.0
    driver.run()


def test_nobody_is_preempted_for_a_draft() -> None:
    driver = Driver(drafter=ScriptedDrafter(*range(20)), num_blocks=4, max_model_len=12, prefix_caching=False)
    driver.add(make_request("a", [1], 8), make_request("b", [2], 8))
    plan = driver.plan()
    assert plan is not None
    assert list(map(len, plan.draft_token_ids.values())) == [7, 3], "b has the block it began with"
    assert driver.kv.num_free_blocks == 0
    assert driver.scheduler.num_running == 2
    driver.run()


@pytest.mark.parametrize("seed", range(6))
def test_streams_are_those_of_no_speculation(seed: int) -> None:
    """Over more requests than fit, with windows, aborts and failures."""
    draw = random.Random(seed)
    driver = Driver(
        layers=WINDOW,
        num_blocks=40,
        max_num_seqs=5,
        budget=24,
        depth=1 + seed % 3,
        drafter=FakeDrafter(0.7, 4, seed),
        step_time=draw.choice([0.0, 0.02]),
    )
    requests: list[EngineRequest] = []
    for index in range(12):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 20))]
        requests.append(make_request(str(index), prompt, draw.randint(1, 30), eos_token_ids=(5,)))
    driver.add(*requests)
    driver.executor.stalling = 0.1
    for _ in range(12):
        driver.step()
        if draw.random() < 0.2 and driver.in_flight:
            driver.finish(fail=True, apply_before_failing=draw.random() < 0.5)
    driver.abort("3")
    driver.run()
    for request in requests:
        if driver.ending(request.request_id)[1] == "abort":
            continue
        assert driver.ending(request.request_id) == generate_alone(request, 64)
    assert 0 < driver.executor.num_accepted < driver.executor.num_drafts


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_states_go_on_from_wherever_drafts_stopped_holding(block_size: int) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        driver = Driver(
            layers=[LayerKV("full", None, 1), LayerKV("state", bytes_per_row=7)],
            block_size=block_size,
            num_blocks=[draw.randint(45, 80), draw.randint(8, 20)],
            max_model_len=40,
            max_num_seqs=3,
            budget=draw.randint(4, 32),
            depth=draw.randint(1, 3),
            drafter=FakeDrafter(0.6, 6, seed),
        )
        lengths = [draw.randint(1, 20) for _ in range(4)]
        requests = [make_request(str(index), [index] * length, 18) for index, length in enumerate(lengths)]
        driver.add(*requests)
        driver.run()
        for request in requests:
            assert driver.ending(request.request_id) == generate_alone(request, 40)
