"""The residency policy under any load: within its budgets, without a lost request, without thrashing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.fleet.residency import Footprint, Order, Residency
from quire.types.errors import MemoryPlanError

MOVE_SECONDS = {"awake": 0.5, "asleep": 0.25, "dropped": 0.1}


def on_gpu(weights: int, rest: int) -> Footprint:
    return Footprint(
        {"device": weights + rest + 1, "host": 1}, {"device": 1, "host": 1 + weights}, {"device": 1, "host": 1}
    )


def on_cpu(weights: int, rest: int) -> Footprint:
    return Footprint({"host": 1 + weights + rest}, {"host": 1 + weights}, {"host": 1})


@dataclass(order=True)
class Event:
    at: float
    kind: str = field(compare=False)
    model: str = field(compare=False, default="")
    seconds: float = field(compare=False, default=0.0)


class World:
    """Runs requests by the policy's orders. A request needs its model awake for some seconds, also in pieces."""

    def __init__(self, policy: Residency, names: list[str], requests: list[tuple[float, str, float]]) -> None:
        self.policy, self.now = policy, 0.0
        self.left: dict[str, list[float]] = {name: [] for name in names}
        self.awake_since: dict[str, float] = {}
        self.events = [Event(at, "request", name, seconds) for at, name, seconds in requests]
        heapq.heapify(self.events)
        self.num_done = 0
        self.num_orders = 0

    def run(self) -> None:
        for _ in range(10_000):
            if not self.events:
                break
            event = heapq.heappop(self.events)
            self._pass_time(event.at)
            if event.kind == "request":
                self.left[event.model].append(event.seconds)
                self.policy.set_open(event.model, len(self.left[event.model]), self.now)
            elif event.kind == "moved":
                self.policy.moved(event.model, self.now)
                if self.policy.place(event.model) == "awake":
                    self.awake_since[event.model] = self.now
            self._obey()
        assert not any(self.left.values()), "requests were never served"

    def _pass_time(self, until: float) -> None:
        for name in self.awake_since:
            spent = until - max(self.now, self.awake_since[name])
            before = len(self.left[name])
            self.left[name] = [rest - spent for rest in self.left[name] if rest - spent > 1e-9]
            if len(self.left[name]) != before:
                self.num_done += before - len(self.left[name])
        self.now = until
        for name, rest in self.left.items():
            if self.policy._models[name].num_open != len(rest):
                self.policy.set_open(name, len(rest), self.now)

    def _obey(self) -> None:
        for order in self.policy.decide(self.now):
            self.num_orders += 1
            if order.goal != "awake" and order.model in self.awake_since:
                resided = self.now - self.awake_since.pop(order.model)
                assert not self.left[order.model] or resided >= self.policy.min_residence - 1e-6, "swapped too soon"
            heapq.heappush(self.events, Event(self.now + MOVE_SECONDS[order.goal], "moved", order.model))
        usage = self.policy.usage()
        assert all(usage[pool] <= most for pool, most in self.policy.budget.items()), "over the budget"
        at = self.policy.next_look(self.now)
        ends = [self.now + min(self.left[name]) for name in self.awake_since if self.left[name]]
        for time in (*ends, *([] if at is None else [at])):
            if not any(abs(event.at - time) < 1e-12 for event in self.events):
                heapq.heappush(self.events, Event(time, "look"))


SIZES = st.tuples(st.integers(1, 8), st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.booleans(), SIZES), min_size=1, max_size=5),
    slack=st.tuples(st.integers(0, 10), st.integers(0, 20)),
    residence=st.sampled_from([1.0, 5.0]),
    load=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 4), st.floats(0.01, 4)), max_size=20),
)
def test_any_load_is_served_within_the_budget(
    kinds: list[tuple[bool, tuple[int, int]]],
    slack: tuple[int, int],
    residence: float,
    load: list[tuple[float, int, float]],
) -> None:
    footprints = [(on_gpu if is_gpu else on_cpu)(*sizes) for is_gpu, sizes in kinds]
    budget = {
        pool: more
        + max(
            one.awake.get(pool, 0) + sum(other.dropped.get(pool, 0) for other in footprints if other is not one)
            for one in footprints
        )
        for pool, more in zip(("device", "host"), slack, strict=True)
    }
    policy = Residency(budget, residence)
    names = [f"m{index}" for index in range(len(footprints))]
    for name, footprint in zip(names, footprints, strict=True):
        policy.add(name, footprint)
    policy.check()
    requests = [(at, names[index % len(names)], seconds) for at, index, seconds in load]
    world = World(policy, names, requests)
    world.run()
    assert world.num_done == len(requests)


def policy(budget: int = 10, residence: float = 5.0, **weights: int) -> Residency:
    made = Residency({"device": budget, "host": 100}, residence)
    for name, size in weights.items():
        made.add(name, Footprint({"device": size}, {"host": size}, {}))
    return made


def wake(made: Residency, name: str, now: float) -> None:
    made.set_open(name, 1, now)
    assert made.decide(now) == [Order(name, "awake")]
    made.moved(name, now)


def test_a_busy_model_stays_for_its_minimum_and_then_makes_room() -> None:
    made = policy(a=6, b=6)
    wake(made, "a", 0.0)
    made.set_open("b", 1, 1.0)
    assert made.decide(1.0) == []
    assert made.next_look(1.0) == 5.0
    assert made.decide(5.0) == [Order("a", "asleep")]
    made.moved("a", 5.5)
    assert made.decide(5.5) == [Order("b", "awake")]
    made.moved("b", 6.0)
    assert made.decide(7.0) == []  # a waits, for it has open requests
    made.set_open("b", 0, 8.0)
    assert made.decide(8.0) == [Order("b", "asleep")]


def test_an_idle_model_makes_room_at_once_and_the_least_recently_used_first() -> None:
    made = policy(a=4, b=4, c=6)
    for name, now in (("a", 0.0), ("b", 0.1)):
        wake(made, name, now)
    for name, now in (("b", 0.2), ("a", 0.3)):
        made.set_open(name, 0, now)
    made.set_open("c", 1, 0.4)
    assert made.decide(0.4) == [Order("b", "asleep")]
    made.moved("b", 0.5)
    assert made.decide(0.5) == [Order("c", "awake")]


def test_nobody_overtakes_the_one_who_waits_for_memory() -> None:
    made = policy(a=6, big=10, small=2)
    wake(made, "a", 0.0)
    made.set_open("big", 1, 1.0)
    made.set_open("small", 1, 2.0)
    assert made.decide(2.0) == []  # small would fit, and would keep big waiting
    made.set_open("a", 0, 3.0)
    assert made.decide(3.0) == [Order("a", "asleep")]


def test_without_room_on_the_host_weights_are_dropped() -> None:
    made = Residency({"device": 10, "host": 7}, 5.0)
    for name in ("a", "b", "c"):
        made.add(name, Footprint({"device": 6}, {"host": 6}, {}))
    for number, name in enumerate(("a", "b", "c")):
        made.set_open(name, 1, number)
        orders = made.decide(number)
        if number == 0:
            assert orders == [Order("a", "awake")]
        elif number == 1:
            assert orders == [Order("a", "asleep")]
        else:  # only one of the two fits asleep
            assert orders == [Order("a", "dropped")]
            made.moved("a", number)
            orders = made.decide(number)
            assert orders == [Order("b", "asleep")]
        for order in orders:
            made.moved(order.model, number)
        for order in made.decide(number):
            made.moved(order.model, number)
        assert made.place(name) == "awake"
        made.set_open(name, 0, number + 0.5)


def test_a_model_that_failed_gets_no_memory_and_others_go_on() -> None:
    made = policy(a=6, b=6)
    made.set_open("a", 1, 0.0)
    assert made.decide(0.0) == [Order("a", "awake")]
    made.failed("a", 1.0, is_final=True)
    made.set_open("b", 1, 1.0)
    assert made.decide(1.0) == [Order("b", "awake")]
    assert made.decide(100.0) == []


def test_a_change_that_failed_is_tried_again_later_and_not_at_once() -> None:
    made = policy(a=6, b=6)
    wake(made, "a", 0.0)
    made.set_open("a", 0, 0.0)
    made.set_open("b", 1, 1.0)
    assert made.decide(1.0) == [Order("a", "asleep")]
    made.failed("a", 1.0)
    assert made.place("a") == "awake"
    assert made.decide(1.5) == []
    assert made.decide(6.0) == [Order("a", "asleep")]


def test_a_model_that_is_held_sleeps_until_it_is_released() -> None:
    made = policy(a=6)
    wake(made, "a", 0.0)
    made.hold("a", "asleep")
    assert made.decide(0.1) == [Order("a", "asleep")]  # busy, and not resident for the minimum
    made.moved("a", 0.2)
    assert made.decide(50.0) == []
    made.release("a")
    assert made.decide(50.0) == [Order("a", "awake")]


def test_a_model_that_can_never_fit_is_refused_with_its_need() -> None:
    made = policy(a=6, b=12)
    with pytest.raises(MemoryPlanError, match="model 'b' needs 12B of device memory"):
        made.check()
