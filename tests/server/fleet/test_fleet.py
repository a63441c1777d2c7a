"""A fleet of fake engines: requests wait for their model, none is lost, and one model's failure is its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from quire.server.fleet.fleet import Fleet, MemberHealth
from quire.server.fleet.residency import Footprint, Residency
from quire.types.errors import EngineDeadError, EngineError, EngineStartError, EngineUnavailableError, QueueFullError

TURN = 0.002  # seconds that a change takes


@dataclass
class FakeMember:
    """An engine that notes where it is; it checks that it is only used while the policy says so."""

    broken: str | None = None
    wake_errors: int = 0
    num_open: int = 0
    max_waiting: int = 100
    refuses: bool = False
    is_dead: bool = False
    places: list[str] = field(default_factory=list)
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.death: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.num_prepared = 0

    async def load(self) -> None:
        await asyncio.sleep(TURN)
        if self.broken is not None:
            self.has_failed = True
            raise EngineStartError(self.broken)
        self.places.append("awake")

    async def sleep(self, level: int) -> None:
        if self.is_dead:
            await asyncio.Event().wait()  # a message to a dead engine waits for the next one
        await asyncio.sleep(TURN)
        self.places.append(f"asleep {level}")

    async def wake(self) -> None:
        await asyncio.sleep(TURN)
        if self.wake_errors:
            self.wake_errors -= 1
            raise EngineError("no memory")
        self.places.append("awake")

    def prepare_to_wake(self) -> None:
        self.num_prepared += 1

    async def wait_failed(self) -> EngineError:
        return await self.death

    def health(self) -> MemberHealth:
        return MemberHealth("ready", "it takes requests")

    async def drain(self) -> bool:
        return True

    async def stop(self) -> None:
        return None


@asynccontextmanager
async def fleet_of(
    budget: int, residence: float = 0.01, **sizes: int
) -> AsyncIterator[tuple[Fleet, dict[str, FakeMember]]]:
    fleet = Fleet(Residency({"device": budget, "host": 1000}, residence))
    members = {name: FakeMember() for name in sizes}
    for name, size in sizes.items():
        fleet.residency.add(name, Footprint({"device": size}, {"host": size}, {}))
        fleet.add(name, members[name])
    try:
        yield fleet, members
    finally:
        await fleet.stop()


async def test_swaps_under_a_random_load_lose_no_request() -> None:
    rng = random.Random(3)
    sizes = {"a": 6, "b": 6, "c": 3, "d": 9}
    async with fleet_of(10, **sizes) as (fleet, members):
        num_done = 0

        async def ask(name: str, delay: float, seconds: float) -> None:
            nonlocal num_done
            await asyncio.sleep(delay)
            async with fleet.using(name):
                assert members[name].places[-1] == "awake"
                usage = fleet.residency.usage()
                assert usage["device"] <= 10
                await asyncio.sleep(seconds)
            num_done += 1

        load = [(rng.choice([*sizes]), rng.random() / 5, rng.random() / 50) for _ in range(200)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(ask(*each) for each in load))
        assert num_done == 200
        assert any("asleep 1" in member.places for member in members.values())


async def test_requests_that_the_engine_has_keep_a_model_wanted() -> None:
    """Work in the background has no connection: the engine's own count stands for it."""
    async with fleet_of(10, a=6, b=6) as (fleet, members):
        async with fleet.using("a"):
            pass
        members["a"].num_open = 1
        async with fleet.using("b"):
            assert members["a"].places[-1] == "asleep 1"
        async with asyncio.timeout(20):
            while members["a"].places[-1] != "awake":
                fleet.look()
                await asyncio.sleep(TURN)


async def test_a_model_that_fails_says_why_and_others_go_on() -> None:
    async with fleet_of(10, a=6, b=6) as (fleet, members):
        members["a"].broken = "its weights are not there"
        await fleet.start()
        assert fleet.health().status == "ready"
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="'a' is not served: its weights are not there"):
                async with fleet.using("a"):
                    pass
        async with fleet.using("b"):
            assert fleet.is_resident("b")
        assert fleet.member_health("a").status == "failed"
        members["b"].death.set_result(EngineDeadError("it died too often"))
        error = await fleet.wait_failed()
        assert "no model can be served" in str(error)


async def test_a_wake_that_fails_is_an_answer_and_the_next_one_may_succeed() -> None:
    async with fleet_of(10, a=6, b=6) as (fleet, members):
        for name in ("a", "b"):
            async with fleet.using(name):
                pass
        members["a"].wake_errors = 1
        with pytest.raises(EngineUnavailableError, match="cannot be used now: no memory"):
            async with fleet.using("a"):
                pass
        async with asyncio.timeout(20), fleet.using("a"):
            assert fleet.is_resident("a")


async def test_a_process_that_died_asleep_comes_back_only_when_it_is_wanted() -> None:
    async with fleet_of(10, a=6, b=6) as (fleet, members):
        async with fleet.using("a"):
            pass
        async with fleet.using("b"):
            relaunch = asyncio.create_task(fleet.may_launch("a"))
            await asyncio.sleep(5 * TURN)
            assert not relaunch.done()
            assert fleet.residency.usage() == {"device": 6, "host": 0}
        async with fleet.using("a"):
            await relaunch
            assert members["a"].num_prepared == 1


async def test_a_process_that_dies_awake_is_launched_again_at_once() -> None:
    async with fleet_of(10, a=6) as (fleet, _), fleet.using("a"):
        await asyncio.wait_for(fleet.may_launch("a"), 10)


async def test_a_process_that_dies_on_its_way_to_sleep_does_not_block_the_others() -> None:
    async with fleet_of(10, a=6, b=6) as (fleet, members):
        async with fleet.using("a"):
            pass
        members["a"].is_dead = True
        task = asyncio.create_task(_use(fleet, "b"))
        await asyncio.sleep(5 * TURN)
        relaunch = asyncio.create_task(fleet.may_launch("a"))
        await asyncio.wait_for(task, 10)
        relaunch.cancel()


async def _use(fleet: Fleet, name: str) -> None:
    async with fleet.using(name):
        pass


async def test_whoever_stops_waiting_leaves_nothing_behind() -> None:
    async with fleet_of(10, residence=100.0, a=6, b=6) as (fleet, _), fleet.using("a"):
        waiting = asyncio.create_task(_use(fleet, "b"))
        await asyncio.sleep(5 * TURN)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert fleet.residency.next_look(0.0) is None
        assert fleet.is_resident("a")


async def test_the_queue_of_a_model_is_bounded() -> None:
    async with fleet_of(10, residence=100.0, a=6, b=6) as (fleet, members), fleet.using("a"):
        members["b"].max_waiting = 2
        waiting = [asyncio.create_task(_use(fleet, "b")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait for the model 'b'"):
            await _use(fleet, "b")
        for task in waiting:
            task.cancel()


async def test_an_operator_keeps_a_model_asleep() -> None:
    async with fleet_of(10, a=6) as (fleet, members):
        await _use(fleet, "a")
        await fleet.hold("a", 2)
        assert members["a"].places == ["awake", "asleep 2"]
        waiting = asyncio.create_task(_use(fleet, "a"))
        await asyncio.sleep(5 * TURN)
        assert not waiting.done()
        members["a"].refuses = True
        with pytest.raises(EngineUnavailableError, match="is asleep, and takes no requests"):
            await _use(fleet, "a")
        await fleet.release("a")
        await asyncio.wait_for(waiting, 10)
