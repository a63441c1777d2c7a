from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.queues import WaitingQueue, make_queue
from quire.sched.request import Request
from quire.types.errors import ConfigError
from tests.sched.driver import make_request

KV = KVCacheManager(plan_layout([LayerKV("full", None, 1)], 4), 4)


def fill(queue: WaitingQueue, priorities: list[int]) -> list[Request]:
    requests = []
    for arrival, priority in enumerate(priorities):
        source = make_request(str(arrival), [1], priority=priority)
        request = Request(source, KV.open(source), queue.order_key(priority, arrival), 64)
        queue.push(request)
        requests.append(request)
    return requests


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while queue:
        assert queue.peek() is next(iter(queue))
        names.append(queue.pop().request_id)
    return names


def test_first_come_first_served_ignores_priority() -> None:
    queue = make_queue("fcfs")
    fill(queue, [3, 1, 2])
    assert drain(queue) == ["0", "1", "2"]


@given(st.lists(st.integers(-2, 2), max_size=12))
def test_priority_then_arrival(priorities: list[int]) -> None:
    queue = make_queue("priority")
    fill(queue, priorities)
    order = [str(i) for _, i in sorted((priority, i) for i, priority in enumerate(priorities))]
    assert [request.request_id for request in queue] == order
    assert drain(queue) == order


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_return_to_their_place(policy: str) -> None:
    queue = make_queue(policy)
    fill(queue, [0] * 5)
    out = [queue.pop() for _ in range(3)]
    for request in reversed(out[1:]):  # the last in order is preempted first
        queue.push_back_in(request)
    assert drain(queue) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removed_requests_are_gone(policy: str) -> None:
    queue = make_queue(policy)
    requests = fill(queue, [2, 1, 0, 1])
    queue.remove({requests[0], requests[2]})
    assert len(queue) == 2
    assert drain(queue) == ["1", "3"]


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="policy is 'random'"):
        make_queue("random")
