"""Parked requests: whatever becomes ready, fails or is aborted in any order, each ends once and blocks nobody."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.core import EngineCore
from quire.engine.parked import ParkedRequests
from quire.types.errors import DuplicateRequestError, RequestError
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from tests.engine.test_core import MAX_LEN, make_core, request
from tests.fakes import generate_alone


@dataclass
class FakeCondition:
    """Applies to requests whose id has its letter; what they wait for comes when the test says so."""

    name: str
    letter: str
    begun: list[tuple[str, Future[str]]] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)

    def applies(self, request: EngineRequest) -> bool:
        return self.letter in request.request_id

    def begin(self, request: EngineRequest) -> Future[str]:
        self.begun.append((request.request_id, Future()))
        return self.begun[-1][1]

    def take(self, request: EngineRequest, found: str) -> None:
        if found == "does not fit":
            raise RequestError(f"{self.name} does not fit", self.name)
        assert found == request.request_id, "this was made for an earlier request of the same name"
        self.held[request.request_id] = found

    def forget(self, request_id: str) -> None:
        self.held.pop(request_id, None)

    def shutdown(self) -> None:
        self.held.clear()


def make(depth: int = 1) -> tuple[EngineCore, FakeCondition, FakeCondition]:
    adapter, blocks = FakeCondition("adapter", "a"), FakeCondition("blocks", "b")
    core, device = make_core(depth)
    return EngineCore(core.scheduler, device, depth, conditions=[adapter, blocks]), adapter, blocks


def settle(core: EngineCore, condition: FakeCondition, index: int, how: str) -> None:
    request_id, future = condition.begun.pop(index)
    if how == "wrong":
        future.set_exception(RequestError("it is wrong", "adapter"))
    elif how == "broken":
        future.set_exception(OSError("the disk is gone"))
    else:
        future.set_result(request_id if how == "ready" else how)
    assert core.parked.has_news


ACTIONS = ["add"] * 4 + ["ready"] * 5 + ["step"] * 5 + ["wrong", "broken", "does not fit", "abort", "twice"]
NAMES = st.sampled_from(["x0", "x1", "a0", "a1", "b0", "b1", "ab0", "ab1"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(depth=st.integers(1, 3), trace=st.lists(st.sampled_from(ACTIONS), max_size=60), data=st.data())
def test_every_request_ends_once_and_as_it_would_alone(depth: int, trace: list[str], data: st.DataObject) -> None:
    core, adapter, blocks = make(depth)
    alive: dict[str, tuple[EngineRequest, list[EngineOutput]]] = {}
    ends: list[tuple[EngineRequest, list[EngineOutput]]] = []

    def collect(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            alive[output.request_id][1].append(output)
            if output.finish_reason is not None:
                ends.append(alive.pop(output.request_id))

    def step() -> None:
        outputs = core.step()
        collect(outputs.outputs)
        assert outputs.stats is not None
        assert outputs.stats.num_waiting + outputs.stats.num_running == len(alive)
        core.check_integrity()

    for action in trace:
        if action == "add" and (name := data.draw(NAMES)) not in alive:
            alive[name] = request(name, 3 + len(ends), 4), []
            collect(core.add_request(alive[name][0]))
        elif action == "twice" and alive:
            (refused,) = core.add_request(request(data.draw(st.sampled_from(sorted(alive)))))
            assert refused.error_field == "request_id"
        elif action == "abort" and alive:
            collect(core.abort([data.draw(st.sampled_from(sorted(alive))), "unknown"]))
        elif action == "step" and core.has_work():
            step()
        elif action in ("ready", "wrong", "broken", "does not fit"):
            condition = data.draw(st.sampled_from([adapter, blocks]))
            if condition.begun:
                settle(core, condition, data.draw(st.integers(0, len(condition.begun) - 1)), action)
        core.check_integrity()
    for condition in (adapter, blocks):
        while condition.begun:
            settle(core, condition, 0, "ready")
    while core.has_unfinished():
        step()
    assert not alive
    assert not adapter.held
    assert not blocks.held
    for asked, outputs in ends:
        reason = outputs[-1].finish_reason
        tokens = [token for output in outputs for token in output.token_ids]
        expected = generate_alone(asked, MAX_LEN)[0]
        assert tokens == (expected[: len(tokens)] if reason == "abort" else [] if reason == "error" else expected)


def test_others_pass_and_stats_count_those_that_wait() -> None:
    core, adapter, _ = make()
    core.add_request(request("a", max_tokens=2))
    core.add_request(request("x", max_tokens=2))
    first = core.step()
    assert [output.request_id for output in first.outputs] == ["x"]
    assert first.stats is not None
    assert (first.stats.num_running, first.stats.num_waiting) == (1, 1)
    core.step()
    assert not core.has_work()
    assert core.has_unfinished()
    settle(core, adapter, 0, "ready")
    assert [output.request_id for output in core.step().outputs] == ["a"]
    assert adapter.held == {"a": "a"}


def test_a_request_waits_for_all_of_its_conditions_and_one_failure_ends_it() -> None:
    core, adapter, blocks = make()
    core.add_request(request("ab"))
    settle(core, blocks, 0, "ready")
    assert core.step().outputs == []
    assert blocks.held == {"ab": "ab"}
    settle(core, adapter, 0, "broken")
    (output,) = core.step().outputs
    assert (output.finish_reason, output.error_field) == ("error", None)
    assert output.error == "its adapter cannot be had: OSError('the disk is gone')"
    assert not blocks.held
    assert not core.has_unfinished()


def test_what_comes_for_an_aborted_request_is_not_given_to_the_next_of_its_name() -> None:
    core, adapter, _ = make()
    core.add_request(request("a"))
    (old,) = adapter.begun
    core.abort(["a"])
    core.add_request(request("a"))
    old[1].set_result("made for the first")
    assert core.step().outputs == []
    assert "a" in core.parked
    settle(core, adapter, 1, "ready")
    assert core.step().outputs[0].token_ids


def test_a_name_that_is_parked_is_taken() -> None:
    parked = ParkedRequests([FakeCondition("adapter", "a")])
    parked.park(request("a"))
    with pytest.raises(DuplicateRequestError, match="'a' is already being served"):
        parked.must_wait(request("a"))


def test_a_parked_request_wakes_whoever_sleeps() -> None:
    core, adapter, _ = make()
    woken: list[Any] = []
    core.parked.on_news = lambda: woken.append(True)
    core.add_request(request("a"))
    assert not woken
    settle(core, adapter, 0, "ready")
    assert woken
