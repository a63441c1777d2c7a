"""Waiting queues: first come first served, and by priority. Both keep preempted requests ahead of new ones."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Set
from itertools import islice

from quire.sched.request import OrderKey, Request
from quire.types.errors import ConfigError


class WaitingQueue:
    """First come first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def order_key(self, priority: int, arrival: int) -> OrderKey:
        """Where a request stands among all others, waiting and running."""
        return (0, arrival)

    def push(self, request: Request) -> None:
        """Add a new request."""
        self._requests.append(request)

    def push_back_in(self, request: Request) -> None:
        """Add a request that was preempted; when several are, the latest in order comes first."""
        self._requests.appendleft(request)

    def peek(self) -> Request:
        """The next request, without taking it."""
        return self._requests[0]

    def first(self, count: int) -> list[Request]:
        """The next requests in order, at most `count`, without taking them."""
        return list(islice(self._requests, count))

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, requests: Set[Request]) -> None:
        """Take out those of `requests` that are here."""
        self._requests = deque(request for request in self._requests if request not in requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue(WaitingQueue):
    """Smaller priority first, then arrival; a preempted request returns to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, Request]] = []

    def order_key(self, priority: int, arrival: int) -> OrderKey:
        return (priority, arrival)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.key, request))

    def push_back_in(self, request: Request) -> None:
        self.push(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def first(self, count: int) -> list[Request]:
        return [request for _, request in heapq.nsmallest(count, self._heap)]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Set[Request]) -> None:
        self._heap = [entry for entry in self._heap if entry[1] not in requests]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


def make_queue(policy: str) -> WaitingQueue:
    if policy == "fcfs":
        return WaitingQueue()
    if policy == "priority":
        return PriorityQueue()
    raise ConfigError(f"policy is {policy!r} but must be 'fcfs' or 'priority'")
