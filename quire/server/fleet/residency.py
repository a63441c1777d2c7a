"""Residency: which models of a server are in memory. A pure policy: events and times in, loads and sleeps out.

A model with open requests is wanted. Wanted models get memory in the order in which they began to wait; what is
resident makes room when it is idle, or when it has been resident for the minimum time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.types.errors import MemoryPlanError
from quire.utils.units import format_bytes

Pool = str
Bytes = Mapping[Pool, int]
Place = Literal["absent", "awake", "asleep", "dropped"]
"""absent: no process; asleep: weights in host memory (sleep level 1); dropped: without weights (level 2)."""
LEVELS: Mapping[Place, int] = {"asleep": 1, "dropped": 2}
_PATIENCE = 1.0  # seconds before something that failed is tried again


class Footprint(NamedTuple):
    """The bytes that a model takes of each pool, by where it is."""

    awake: Bytes
    asleep: Bytes
    dropped: Bytes

    def at(self, place: Place) -> Bytes:
        return {} if place == "absent" else getattr(self, place)


class Order(NamedTuple):
    """Take a model to a place; `moved` or `failed` ends it."""

    model: str
    goal: Place


@dataclass(slots=True)
class _Resident:
    footprint: Footprint
    place: Place = "absent"
    goal: Place | None = None  # where it is being taken
    num_open: int = 0
    waits_since: float = 0.0  # while it is wanted and not awake
    awake_since: float = 0.0
    used_at: float = 0.0
    not_before: float = 0.0  # no order until then: the last one failed
    has_failed: bool = False
    held: Place | None = None  # where an operator keeps it

    @property
    def is_settled(self) -> bool:
        return self.goal is None and not self.has_failed

    @property
    def is_waiting(self) -> bool:
        return self.num_open > 0 and self.place != "awake" and self.held is None and not self.has_failed

    def takes(self, goal: Place | None = None) -> dict[Pool, int]:
        """Now; on the way to `goal`, or to where it is being taken, the larger of both places."""
        ways = [self.footprint.at(self.place), self.footprint.at(goal or self.goal or self.place)]
        return {pool: max(way.get(pool, 0) for way in ways) for pool in {*ways[0], *ways[1]}}


@dataclass(slots=True)
class Residency:
    """`budget` bounds the bytes of each pool. Times are seconds of any clock that does not go back."""

    budget: Bytes
    min_residence: float
    _models: dict[str, _Resident] = field(default_factory=dict)

    def add(self, model: str, footprint: Footprint) -> None:
        self._models[model] = _Resident(footprint)

    def check(self) -> None:
        """MemoryPlanError unless each model fits while all others have dropped their weights."""
        for name, model in self._models.items():
            others = [other.footprint.dropped for other in self._models.values() if other is not model]
            for pool, most in self.budget.items():
                needed = model.footprint.awake.get(pool, 0) + sum(each.get(pool, 0) for each in others)
                if needed > most:
                    raise MemoryPlanError(
                        f"model {name!r} needs {format_bytes(needed)} of {pool} memory with the other models asleep,"
                        f" and the budget is {format_bytes(most)}; raise the budget, or lower its kv_cache_memory or"
                        " max_model_len"
                    )

    def place(self, model: str) -> Place:
        return self._models[model].place

    def goal(self, model: str) -> Place | None:
        """Where it is being taken; None: nowhere."""
        return self._models[model].goal

    def is_held(self, model: str) -> bool:
        return self._models[model].held is not None

    def usage(self) -> dict[Pool, int]:
        """Bytes that are taken of each pool, those of changes under way included."""
        return self._sum(model.takes() for model in self._models.values())

    def fits(self, model: str) -> bool:
        """Whether it can be awake without a change of others."""
        return self._is_within(self._others(model), self._models[model].takes("awake"))

    def set_open(self, model: str, count: int, now: float) -> None:
        """The number of its open requests has changed."""
        found = self._models[model]
        if count and not found.num_open:
            found.waits_since = now
        found.num_open, found.used_at = count, now

    def hold(self, model: str, place: Place) -> None:
        """Keep it there, whatever requests come, until it is released."""
        self._models[model].held = place

    def release(self, model: str) -> None:
        self._models[model].held = None

    def moved(self, model: str, now: float) -> None:
        """It is where it was to be taken."""
        found = self._models[model]
        assert found.goal is not None, "nothing was ordered"
        found.place, found.goal = found.goal, None
        if found.place == "awake":
            found.awake_since = now

    def failed(self, model: str, now: float, *, is_final: bool = False) -> None:
        """An order could not be obeyed: the model is where it was, or, with `is_final`, gone for good."""
        found = self._models[model]
        found.goal, found.not_before = None, now + max(_PATIENCE, self.min_residence)
        if is_final:
            found.place, found.has_failed = "absent", True

    def lost(self, model: str) -> None:
        """Its process has ended while it slept: it takes no memory until it is loaded again."""
        self._models[model].place, self._models[model].goal = "absent", None

    def decide(self, now: float) -> list[Order]:
        """What is to be done now; each order has begun when this returns."""
        orders: list[Order] = []
        for name, model in self._models.items():
            if model.held is not None and model.is_settled and model.place == "awake" and model.not_before <= now:
                self._begin(orders, name, model.held, now)
        for name in self._queue():
            model = self._models[name]
            if model.goal is not None or model.not_before > now:
                continue
            if self.fits(name):
                self._begin(orders, name, "awake", now)
                continue
            for move in self._make_room(name, now):
                moved = self._models[move.model]
                if self._is_within(self._others(move.model), moved.takes(move.goal)):
                    self._begin(orders, *move, now)
            break  # whoever came later does not get what this one waits for
        return orders

    def next_look(self, now: float) -> float | None:
        """When `decide` may have something to do though nothing has happened; None: not by itself."""
        if not any(model.is_waiting or model.held for model in self._models.values()):
            return None
        times = [model.awake_since + self.min_residence for model in self._models.values() if model.place == "awake"]
        times += [model.not_before for model in self._models.values()]
        return min((at for at in times if at > now), default=None)

    def _begin(self, orders: list[Order], name: str, goal: Place, now: float) -> None:
        model = self._models[name]
        model.goal = goal
        if goal != "awake":
            model.waits_since = now  # behind those for whom it makes room
        orders.append(Order(name, goal))

    def _queue(self) -> list[str]:
        waiting = [name for name, model in self._models.items() if model.is_waiting]
        return sorted(waiting, key=lambda name: self._models[name].waits_since)

    def _make_room(self, name: str, now: float) -> list[Order]:
        """The mildest moves after which a model fits, once those under way have ended; none if none suffice."""
        wanted = self._models[name].takes("awake")
        goals: dict[str, Place] = {}
        if self._would_fit(name, wanted, goals):
            return []
        for move in self._candidates(now):
            if move.model == name:
                continue
            goals[move.model] = move.goal
            if self._would_fit(name, wanted, goals):
                return [Order(*each) for each in self._pruned(name, wanted, goals).items()]
        return []

    def _candidates(self, now: float) -> list[Order]:
        """Who can make room, in the order in which they are asked to: idle before busy, sleep before dropping."""
        settled = [(name, m) for name, m in self._models.items() if m.is_settled and m.not_before <= now]
        awake = sorted(((name, m) for name, m in settled if m.place == "awake"), key=lambda each: each[1].used_at)
        asleep = sorted(((name, m) for name, m in settled if m.place == "asleep"), key=lambda each: each[1].used_at)
        idle = [name for name, m in awake if not m.num_open]
        ripe = [name for name, m in awake if m.num_open and now - m.awake_since >= self.min_residence]
        ripe.sort(key=lambda name: self._models[name].awake_since)
        return [
            *(Order(name, "asleep") for name in (*idle, *ripe)),
            *(Order(name, "dropped") for name in (*(name for name, _ in asleep), *idle, *ripe)),
        ]

    def _pruned(self, name: str, wanted: Bytes, goals: dict[str, Place]) -> dict[str, Place]:
        """Without moves that are not needed, and with sleep instead of dropping where that does."""
        for model in reversed(list(goals)):
            kept = goals.pop(model)
            if self._would_fit(name, wanted, goals):
                continue
            goals[model] = "asleep" if self._models[model].place == "awake" else kept
            if not self._would_fit(name, wanted, goals):
                goals[model] = kept
        return goals

    def _would_fit(self, name: str, wanted: Bytes, goals: Mapping[str, Place]) -> bool:
        others = [
            model.footprint.at(goals.get(other) or model.goal or model.place)
            for other, model in self._models.items()
            if other != name
        ]
        return self._is_within(self._sum(others), wanted)

    def _others(self, name: str) -> dict[Pool, int]:
        return self._sum(model.takes() for other, model in self._models.items() if other != name)

    def _sum(self, parts: Iterable[Bytes]) -> dict[Pool, int]:
        listed: Sequence[Bytes] = list(parts)
        return {pool: sum(part.get(pool, 0) for part in listed) for pool in self.budget}

    def _is_within(self, taken: Bytes, more: Bytes) -> bool:
        return all(taken[pool] + more.get(pool, 0) <= most for pool, most in self.budget.items())
