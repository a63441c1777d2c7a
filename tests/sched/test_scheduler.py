"""Any trace of arrivals, aborts, failures and steps in flight: every request gives what it would give alone."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kv.layout import LayerKV, plan_layout
from quire.types.errors import EngineError
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepResult
from tests.fakes import VOCAB_SIZE, FakeDrafter, generate_alone
from tests.sched.driver import Driver, make_request

MAX_MODEL_LEN = 40
ADAPTERS = [AdapterRef(name, f"digest of {name}", name) for name in "abc"]
SHARED = [(7 * index) % VOCAB_SIZE for index in range(32)]

layouts = st.one_of(
    st.just([LayerKV("full", None, 1)] * 2),
    st.integers(1, 12).map(lambda window: [LayerKV("sliding", window, 1)]),
    st.integers(1, 12).map(lambda window: [LayerKV("full", None, 1), *[LayerKV("sliding", window, 1)] * 2]),
    st.integers(1, 12).map(lambda chunk: [LayerKV("full", None, 1), LayerKV("chunked", chunk, 1)]),
    st.integers(1, 12).map(lambda window: [LayerKV("full", None, 2), *[LayerKV("sliding", window, 1)] * 2]),
    st.just([LayerKV("full", None, 1), *[LayerKV("state", bytes_per_row=7)] * 2]),
    st.just([LayerKV("state", bytes_per_row=7)]),
    st.tuples(st.integers(1, 12), st.integers(1, 12)).map(
        lambda sizes: [
            LayerKV("sliding", sizes[0], 2),
            LayerKV("chunked", sizes[1], 1),
            LayerKV("latent", None, 3),
            LayerKV("state", bytes_per_row=7),
            LayerKV("state", bytes_per_row=9),
        ]
    ),
)

drafters = st.one_of(
    st.none(),
    st.builds(FakeDrafter, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(1, 5), st.integers(0, 99)),
)


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    layers, block_size = draw(layouts), draw(st.sampled_from([1, 2, 4]))
    budget = draw(st.integers(1, 16))
    least = plan_layout(layers, block_size).blocks_for(MAX_MODEL_LEN, budget)
    return Driver(
        layers=layers,
        block_size=block_size,
        num_blocks=[1 + count + draw(st.integers(0, 12)) for count in least],
        max_num_seqs=draw(st.integers(1, 5)),
        budget=budget,
        threshold=draw(st.integers(1, budget)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=draw(st.booleans()),
        depth=draw(st.integers(1, 3)),
        step_time=draw(st.sampled_from([0.0, 0.001, 0.02, 1.0])),
        drafter=draw(drafters),
        adapter_slots=draw(st.integers(1, 2)),
    )


@st.composite
def requests(draw: st.DrawFn, name: str) -> EngineRequest:
    start = SHARED[: draw(st.integers(0, 32))]
    end = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if start else 1, max_size=6))
    params = SamplingParams(
        max_tokens=None,
        stop_token_ids=draw(st.sampled_from([(), (3, 4)])),
        min_tokens=draw(st.sampled_from([0, 3])),
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        logprobs=draw(st.sampled_from([None, 1])),
    )
    request = make_request(
        name,
        start + end,
        draw(st.integers(1, 24)),
        params,
        eos_token_ids=(5, 6, 7),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, None, "salt"])),
        adapter=draw(st.sampled_from([None, None, *ADAPTERS])),
    )
    return resumed(request, draw(st.sampled_from([0, 0, 1, 3, 9])))


def resumed(request: EngineRequest, count: int) -> EngineRequest:
    """The request as it is submitted again after its first outputs, `count` of them if it has more."""
    outputs = generate_alone(request, MAX_MODEL_LEN)[0]
    given = outputs[: min(count, len(outputs) - 1)]
    token_ids = request.token_ids + given
    return msgspec.structs.replace(request, token_ids=token_ids, num_prompt_tokens=len(request.token_ids))


ACTIONS = ["plan"] * 5 + ["finish"] * 5 + ["add"] * 3 + ["preempt", "abort", "fail", "reset"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(driver=drivers(), trace=st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=60), data=st.data())
def test_every_trace_gives_what_each_request_gives_alone(
    driver: Driver, trace: list[str], data: st.DataObject
) -> None:
    added: dict[str, EngineRequest] = {}
    poisoned = data.draw(st.sampled_from([frozenset(), frozenset(["1"])]))
    driver.executor.poisoned = poisoned
    driver.executor.stalling = data.draw(st.sampled_from([0.0, 0.0, 0.3]))
    retried_in_vain = set()
    for action in trace:
        if action == "add" and len(added) < 8:
            request = data.draw(requests(str(len(added))))
            added[request.request_id] = request
            driver.add(request)
        elif action == "plan" and len(driver.in_flight) < driver.depth:
            driver.plan()
        elif action == "finish" and driver.in_flight:
            driver.finish()
        elif action == "fail" and driver.in_flight:
            plan = driver.in_flight[0]
            if driver.scheduler.state.in_flight[0].retry:
                retried_in_vain.add(plan.step_id)
            driver.finish(fail=True, apply_before_failing=data.draw(st.booleans()))
        elif action == "abort" and added:
            driver.abort(data.draw(st.sampled_from(sorted(added))), "unknown")
        elif action == "preempt":
            driver.preempt_last()
        elif action == "reset":
            driver.scheduler.reset_prefix_cache()
    driver.run()
    errors = 0
    for name, request in added.items():
        output, reason, stop_reason = driver.ending(name)
        expected = generate_alone(request, MAX_MODEL_LEN)
        assert isinstance(request.params, SamplingParams)
        if reason in ("abort", "error"):
            errors += reason == "error" and name not in poisoned
            assert output == expected[0][: len(output)]
            continue
        assert name not in poisoned
        assert (output, reason, stop_reason) == expected
        given_out = [entry.token_ids[0] for one in driver.outputs[name] for entry in one.prompt_logprobs or []]
        wants = request.params.prompt_logprobs is not None and not request.num_given_outputs
        assert given_out == (request.token_ids[1:] if wants else []), "those of a prompt come before its outputs"
        logprobs = [entry.token_ids[0] for one in driver.outputs[name] for entry in one.logprobs or []]
        assert logprobs == (output if request.params.logprobs is not None else [])
        assert driver.outputs[name][0].num_cached_tokens >= 0
    assert errors <= len(retried_in_vain), "an innocent request ended with an error"


def test_no_request_outlives_its_end() -> None:
    driver = Driver(num_blocks=18, max_num_seqs=3, budget=16, depth=2, max_model_len=32)
    gc.collect()
    gc.disable()
    try:
        driver.add(*(make_request(str(i), SHARED[: 8 + i], 12, priority=i % 2) for i in range(9)))
        alive = [weakref.ref(request) for request in driver.scheduler._state.requests.values()]
        for _ in range(4):
            driver.step()
        driver.abort("2", "8")
        driver.step()
        driver.finish(fail=True)
        driver.run()
        assert driver.scheduler.stats().num_preemptions > 0
        assert [reference() for reference in alive if reference() is not None] == []
    finally:
        gc.enable()
    state = driver.scheduler._state
    left = (state.requests, state.running, state.waiting, state.retries, state.in_flight)
    assert [len(collection) for collection in left] == [0] * 5


def test_a_reused_id_is_a_new_request() -> None:
    driver = Driver()
    for prompt in (SHARED[:9], SHARED[:5]):
        driver.add(make_request("same", prompt))
        driver.run()
        assert driver.ending("same") == generate_alone(make_request("same", prompt), 64)


def test_results_must_come_back_in_order() -> None:
    driver = Driver(depth=2)
    driver.add(make_request("a", [1, 2, 3]))
    first, second = driver.plan(), driver.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(EngineError, match="step 1 came back out of order; the oldest in flight is 0"):
        driver.scheduler.update(second, StepResult(second.step_id, [[1]]))
    with pytest.raises(EngineError, match="planned 1 rows but its result has 2"):
        driver.scheduler.update(first, StepResult(first.step_id, [[1], [2]]))


def test_stats_follow_the_steps() -> None:
    driver = Driver(num_blocks=33)
    driver.add(make_request("a", SHARED[:9], 2), make_request("b", SHARED[:10], 2))
    assert (driver.scheduler.num_waiting, driver.scheduler.num_running) == (2, 0)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.step_tokens) == (2, 0, 19)
    assert (stats.num_blocks, stats.num_free_blocks) == (32, 26)
    driver.run()
    driver.add(make_request("c", SHARED[:12], 2))
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (31, 8)
    assert stats.prompt_tokens == 31 - 8
    assert driver.outputs["c"][0].num_cached_tokens == 8
    assert stats.num_free_blocks == 32


@pytest.mark.parametrize("budget", [3, 7, 19, 64])
def test_prompt_tokens_are_counted_as_they_are_computed(budget: int) -> None:
    driver = Driver(budget=budget, prefix_caching=False)
    driver.add(make_request("a", SHARED[:20], 5))
    counted = []
    while driver.scheduler.has_unfinished:
        driver.step()
        counted.append(driver.scheduler.stats().prompt_tokens)
    assert counted == [min(20, budget * step) for step in range(1, len(counted) + 1)]


def test_stats_tell_of_prompts_in_the_making() -> None:
    driver = Driver(budget=8)
    driver.add(make_request("a", [1], 8))
    driver.step()
    driver.add(make_request("b", SHARED[:20], 2))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_prefilling, stats.prefill_tokens_left) == (2, 1, 13)
    driver.abort("b")
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_prefilling, stats.prefill_tokens_left) == (1, 0, 0)


def test_a_steady_decode_step_carries_no_changes() -> None:
    driver = Driver(block_size=8)
    driver.add(*(make_request(str(i), SHARED[:3], 5) for i in range(4)))
    driver.step()
    driver.step()
    plan = driver.plans[1]
    assert (plan.rows, plan.num_tokens) == ([0, 1, 2, 3], [1] * 4)
    assert (plan.starts, plan.freed_rows, plan.block_rows) == ([], [], [])
