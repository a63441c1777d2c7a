"""ApiProcesses over fake processes: what they are told, who is launched again, and when the server gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from quire.metrics.stats import HttpEnd, Observer, TokenEvent
from quire.server.processes.messages import (
    Counted,
    Drain,
    Drained,
    Failed,
    Flush,
    Flushed,
    FromApi,
    Joined,
    ProviderState,
    Serving,
    ToApi,
)
from quire.server.processes.parent import ApiProcesses
from quire.server.supervisor import Health
from quire.types.errors import ConfigError, EngineDeadError, EngineUnavailableError
from tests.engine.processes import request


class Child:
    """The hand on a process that is none."""

    def __init__(self, process: FakeProcess) -> None:
        self.pid = 7
        self._process = process

    def cause_of_death(self) -> str:
        return "the API process 7 was killed"

    def stop(self, grace: float) -> None:
        self._process.loop.call_soon_threadsafe(self._process.die)

    kill = stop


class FakeProcess:
    def __init__(self, index: int, take: Callable[..., None], on_exit: Callable[..., None]) -> None:
        self.index = index
        self.loop = asyncio.get_running_loop()
        self.told: ProviderState | None = None
        self.is_connected = self.is_serving = self.is_drained = False
        self.heard: list[ToApi] = []
        self.child = Child(self)
        self._take, self._on_exit = take, on_exit

    def send(self, message: ToApi) -> None:
        self.heard.append(message)

    def look(self) -> None:
        pass

    def says(self, message: FromApi) -> None:
        self.is_connected = True
        self._take(self, message)

    def die(self) -> None:
        self.is_connected = False
        self._on_exit(self)


class Source:
    """A supervisor whose engine has not been started."""

    @property
    def engine(self) -> Any:
        raise EngineUnavailableError("it is loading", 3.0)

    def health(self) -> Health:
        return Health("starting", "loading: weights", 0, 0)


class Counts(Observer):
    def __init__(self) -> None:
        self.tokens = 0
        self.calls: list[HttpEnd] = []

    def on_tokens(self, event: TokenEvent) -> None:
        self.tokens += event.num_generation_tokens

    def on_http_end(self, event: HttpEnd) -> None:
        self.calls.append(event)


class Group:
    """Two fake processes that are being served."""

    def __init__(self, max_restarts: int = 1) -> None:
        self.launched: list[FakeProcess] = []
        self.counts = Counts()

        def launch(index: int, take: Any, on_exit: Any, context: Any) -> Any:
            self.launched.append(FakeProcess(index, take, on_exit))
            return self.launched[-1]

        self.processes = ApiProcesses(2, launch, self.counts, max_restarts)
        self.processes.source = Source()

    async def __aenter__(self) -> Group:
        self.serving = asyncio.create_task(self.processes.serve())
        await self.until(lambda: len(self.launched) == 2)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.processes.should_exit = True
        await asyncio.wait([self.serving], timeout=10)

    def has_launched(self, count: int) -> bool:
        return len(self.launched) == count

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)


async def test_a_process_is_told_how_the_engine_is_as_soon_as_it_joins() -> None:
    async with Group() as group:
        first = group.launched[0]
        first.says(Joined("ipc://nowhere"))
        told = first.heard[0]
        assert isinstance(told, ProviderState)
        assert (told.status, told.unavailable, told.retry_after, told.info) == (
            "starting",
            "it is loading",
            3.0,
            None,
        )
        await asyncio.sleep(0.25)  # two looks
        assert first.heard == [told], "nothing has changed"
    assert await group.serving is None


async def test_one_that_served_and_died_is_launched_again_at_once() -> None:
    async with Group() as group:
        waiting = asyncio.create_task(group.processes.wait_serving())
        for process in list(group.launched):
            process.says(Serving())
        await asyncio.wait_for(waiting, 5)
        for _ in range(4):  # more often than max_restarts
            before = len(group.launched)
            group.launched[-1].die()
            await group.until(partial(group.has_launched, before + 1))
            group.launched[-1].says(Serving())
        assert not group.serving.done()
    assert await group.serving is None


async def test_one_that_never_serves_ends_the_server_with_the_cause() -> None:
    async with Group(max_restarts=0) as group:
        group.launched[1].die()
        with pytest.raises(EngineDeadError, match="process 1 does not come up: the API process 7 was killed"):
            await asyncio.wait_for(group.serving, 10)


async def test_a_wrong_setting_that_a_process_finds_ends_the_server() -> None:
    async with Group() as group:
        group.launched[0].says(Failed("tool_call_parser is 'x'"))
        with pytest.raises(ConfigError, match="tool_call_parser is 'x'"):
            await asyncio.wait_for(group.serving, 10)


async def test_a_flush_waits_for_all_who_live_and_counts_what_they_say() -> None:
    async with Group() as group:
        first, second = group.launched
        for process in (first, second):
            process.says(Joined("ipc://nowhere"))
        flushing = asyncio.create_task(group.processes.flush())
        await asyncio.sleep(0)
        orders = [message for process in (first, second) for message in process.heard if isinstance(message, Flush)]
        first.says(Counted(TokenEvent(5), [], [HttpEnd("GET", "/health", 200, 0.1)]))
        first.says(Flushed(orders[0].id))
        assert not flushing.done()
        second.die()
        await asyncio.wait_for(flushing, 5)
        assert (group.counts.tokens, len(group.counts.calls)) == (5, 1)


async def test_a_drain_waits_for_each_process_that_lives() -> None:
    async with Group() as group:
        first, second = group.launched
        for process in (first, second):
            process.says(Joined("ipc://nowhere"))
        draining = asyncio.create_task(group.processes.drain("it ends", 10))
        await asyncio.sleep(0)
        assert first.heard[-1] == second.heard[-1] == Drain("it ends")
        first.says(Drained())
        await asyncio.sleep(0.01)
        assert not draining.done()
        second.says(Drained())
        assert await asyncio.wait_for(draining, 5)
        second.is_drained = False
        assert not await group.processes.drain("it ends", 0.01)


async def test_a_request_that_comes_before_an_engine_fails_alone() -> None:
    async with Group() as group:
        group.launched[0].says(request("a"))
        (answer,) = group.launched[0].heard
        assert "there is no engine" in str(answer)


async def test_one_that_ends_during_a_drain_is_not_launched_again(caplog: pytest.LogCaptureFixture) -> None:
    async with Group(max_restarts=5) as group:
        first, second = group.launched
        first.die()  # waits for its next launch
        second.says(Joined("ipc://nowhere"))
        draining = asyncio.create_task(group.processes.drain("it ends", 10))
        await asyncio.sleep(0)
        second.die()
        assert await asyncio.wait_for(draining, 5)
        await asyncio.sleep(0.7)  # longer than the wait for the first launch, and several looks at who is due
        assert group.launched == [first, second]
    assert "the API process 7 was killed; the server is stopping, so API process 1 is not" in caplog.text
