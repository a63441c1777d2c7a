"""Fleet: the engines of several models in one server. Obeys the residency policy, and has requests wait for a model.

Knows models, memory and engines, not HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from quire.server.context import HealthReport
from quire.server.fleet.residency import LEVELS, Order, Place, Residency
from quire.types.errors import EngineError, EngineUnavailableError, QueueFullError
from quire.utils.log import get_logger
from quire.utils.units import format_bytes

logger = get_logger(__name__)

_RETRY_AFTER = 2.0  # seconds
_WORDS: Mapping[Place, tuple[str, str]] = {
    "absent": ("unloaded", "it is loaded when a request names it"),
    "asleep": ("asleep", "its weights are in host memory; a request wakes it"),
    "dropped": ("asleep", "its weights are not in memory; a request wakes it"),
}


class Member(Protocol):
    """One model's engine, as the fleet handles it."""

    @property
    def num_open(self) -> int:
        """Requests that its engine has, also those without a connection."""
        ...

    @property
    def max_waiting(self) -> int: ...

    @property
    def has_failed(self) -> bool: ...

    @property
    def refuses(self) -> bool:
        """Whether requests are refused while an operator keeps it asleep."""
        ...

    async def load(self) -> None:
        """Have a process take requests; EngineError if none will."""
        ...

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    def prepare_to_wake(self) -> None:
        """The next process is to be awake, whatever the one before it was."""
        ...

    async def wait_failed(self) -> EngineError: ...

    def health(self) -> HealthReport: ...

    async def drain(self) -> bool: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class MemberHealth:
    status: str
    detail: str


class Fleet:
    """Everything is called on one event loop."""

    def __init__(self, residency: Residency, clock: Callable[[], float] = time.monotonic) -> None:
        self.residency = residency
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._leases: dict[str, int] = {}  # requests that wait for a model or use it
        self._known_open: dict[str, int] = {}
        self._reasons: dict[str, str] = {}  # why a model is not served
        self._refusals: dict[str, tuple[int, str]] = {}  # of changes that failed: their number, the last reason
        self._moves: dict[str, asyncio.Task[None]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._turn = asyncio.Event()
        self._failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._status, self._detail = "starting", "models are being loaded"

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def add(self, name: str, member: Member) -> None:
        self._members[name], self._leases[name], self._known_open[name] = member, 0, 0

    def give_up(self, name: str, reason: str) -> None:
        """A model that is never served, for this reason."""
        if name not in self._reasons:
            logger.error("model %s is not served: %s", name, reason)
            self._reasons[name] = reason
            self.residency.failed(name, self._clock(), is_final=True)
            if len(self._reasons) == len(self._members) and not self._failed.done():
                self._failed.set_result(EngineError(f"no model can be served; {name}: {reason}"))
            self._turned()

    async def start(self) -> None:
        """Load models in their order, as many as fit; raises if none can be served."""
        for name in self._members:
            if self.residency.fits(name) and name not in self._reasons:
                try:
                    async with self.using(name):
                        pass
                except EngineUnavailableError as error:
                    logger.debug("%s", error)
        if self._failed.done():
            raise self._failed.result()
        self._status, self._detail = "ready", "it takes requests"

    async def wait_failed(self) -> EngineError:
        return await asyncio.shield(self._failed)

    async def drain(self) -> bool:
        """Take no more requests, and let those end that run; models still take turns meanwhile."""
        self._status, self._detail = "draining", "it finishes what runs and takes no more requests"
        self._turned()
        return all(await asyncio.gather(*(member.drain() for member in self._members.values())))

    async def stop(self) -> None:
        self._status, self._detail = "stopped", "the server is stopping"
        if self._timer is not None:
            self._timer.cancel()
        for task in (*self._moves.values(), *self._watching):
            task.cancel()
        self._turned()
        await asyncio.gather(*(member.stop() for member in self._members.values()))

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Keep a model wanted, and begin when it is in memory. EngineUnavailableError if it cannot be."""
        member = self._members[name]
        if not self._is_awake(name) and self._leases[name] >= member.max_waiting:
            raise QueueFullError(f"{self._leases[name]} requests wait for the model {name!r}; try again later")
        self._leases[name] += 1
        try:
            self.look()
            await self._until_awake(name)
            yield
        finally:
            self._leases[name] -= 1
            self.look()

    def is_loaded(self, name: str) -> bool:
        """Whether an engine has been there, awake or asleep now."""
        return self.residency.place(name) != "absent"

    def is_resident(self, name: str) -> bool:
        return self.residency.place(name) == "awake"

    def health(self) -> MemberHealth:
        if self._failed.done():
            return MemberHealth("failed", str(self._failed.result()))
        return MemberHealth(self._status, self._detail)

    def member_health(self, name: str) -> HealthReport:
        place, goal = self.residency.place(name), self.residency.goal(name)
        if name in self._reasons:
            return MemberHealth("failed", self._reasons[name])
        if place == "absent" and goal is None:
            return MemberHealth(*_WORDS["absent"])
        if goal is None and place != "awake":
            if self.residency.is_held(name):
                return MemberHealth("asleep", "an operator keeps it asleep")
            return MemberHealth(*_WORDS[place])
        return self._members[name].health()

    def look(self) -> None:
        """Something has changed: let the policy decide."""
        if self._status == "stopped":
            return
        now = self._clock()
        for name, member in self._members.items():
            count = max(self._leases[name], member.num_open)
            if count != self._known_open[name]:
                self._known_open[name] = count
                self.residency.set_open(name, count, now)
        for order in self.residency.decide(now):
            self._moves[order.model] = asyncio.create_task(self._move(order), name=f"quire-move-{order.model}")
        if self._timer is not None:
            self._timer.cancel()
        at = self.residency.next_look(now)
        self._timer = None if at is None else asyncio.get_running_loop().call_later(max(0.0, at - now), self.look)

    async def may_launch(self, name: str) -> None:
        """Wait until a process of this model may take its memory. It may if it is to be awake.

        A process that died asleep, or on its way there, has given all of its memory back.
        """
        if self.residency.goal(name) != "awake" and self.residency.place(name) != "awake":
            self.residency.lost(name)
        elif self.residency.goal(name) in LEVELS:
            self._moves.pop(name).cancel()
            self.residency.lost(name)
        if self.residency.place(name) == "absent":
            self.look()
            while self.residency.goal(name) != "awake":
                await self._turn_of()
        self._members[name].prepare_to_wake()

    async def hold(self, name: str, level: int) -> None:
        """Put a model to sleep, whatever requests come, until `release`."""
        place: Place = "asleep" if level == 1 else "dropped"
        self.residency.hold(name, place)
        self.look()
        await self._until_settled(name)
        if self._is_awake(name):
            self.residency.release(name)
            raise EngineError(f"the model {name!r} could not be put to sleep: {self._refusals[name][1]}")

    async def release(self, name: str) -> None:
        """Wake a model that was held."""
        self.residency.release(name)
        async with self.using(name):
            pass

    async def _move(self, order: Order) -> None:
        name, goal = order
        member, begin = self._members[name], self._clock()
        self._turned()
        try:
            if goal != "awake":
                await member.sleep(LEVELS[goal])
            elif self.residency.place(name) == "absent":
                await member.load()
                self._watch(name)
            else:
                await member.wake()
        except EngineError as error:
            count, _ = self._refusals.get(name, (0, ""))
            self._refusals[name] = count + 1, str(error)
            if member.has_failed:
                self.give_up(name, str(error))
            else:
                logger.error("model %s cannot be taken to %r: %s", name, goal, error)
                self.residency.failed(name, self._clock())
        else:
            self.residency.moved(name, self._clock())
            taken = ", ".join(f"{pool} {format_bytes(count)}" for pool, count in self.residency.usage().items())
            logger.info("model %s is %s after %.2f s; %s are taken", name, goal, self._clock() - begin, taken)
        self._moves.pop(name, None)
        self._turned()
        self.look()

    def _watch(self, name: str) -> None:
        """Give a model up when its supervisor does."""

        async def watch() -> None:
            self.give_up(name, str(await self._members[name].wait_failed()))
            self.look()

        task = asyncio.create_task(watch(), name=f"quire-watch-{name}")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def _is_awake(self, name: str) -> bool:
        return self.residency.place(name) == "awake" and self.residency.goal(name) is None

    async def _until_awake(self, name: str) -> None:
        before = self._refusals.get(name, (0, ""))[0]
        while not self._is_awake(name):
            if self._status in ("draining", "stopped"):
                raise EngineUnavailableError(f"the server is {self._status}: {self._detail}", _RETRY_AFTER)
            if name in self._reasons:
                raise EngineUnavailableError(f"the model {name!r} is not served: {self._reasons[name]}", _RETRY_AFTER)
            count, reason = self._refusals.get(name, (0, ""))
            if count != before:
                raise EngineUnavailableError(f"the model {name!r} cannot be used now: {reason}", _RETRY_AFTER)
            if self.residency.is_held(name) and self._members[name].refuses:
                raise EngineUnavailableError(f"the model {name!r} is asleep, and takes no requests", _RETRY_AFTER)
            await self._turn_of()

    async def _until_settled(self, name: str) -> None:
        while self.residency.goal(name) is not None:
            await self._turn_of()

    def _turned(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    async def _turn_of(self) -> None:
        await self._turn.wait()
