"""The supervisor: an engine that dies is replaced, one that hangs is found out, one that cannot run is given up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.replicas import ReplicaClient
from quire.engine.spare import NO_SPARE, SpareEngine
from quire.engine.zmq_client import OnPhase, ZmqClient
from quire.metrics.prometheus import PrometheusObserver
from quire.server.supervisor import EngineSupervisor, SupervisorOptions, backoff
from quire.types.errors import EngineDeadError, EngineStartError, EngineUnavailableError, GenerationError
from quire.types.outputs import RequestOutput
from quire.types.request import AdapterRef
from quire.types.sampling import SamplingParams
from tests.engine.fake_engine import COMMAND, DAMAGED, EXIT, STALL, STICKY
from tests.engine.processes import LIMIT, Watch, pids, request
from tests.fakes import generate_alone
from tests.frontend.fake_client import text_model
from tests.metrics.scrape import scrape

QUICK = {"restart_backoff": 0.001}


class Keeper:
    """A supervisor of fake engines, with their log."""

    def __init__(
        self, words: str, with_spare: bool = False, adapters: Sequence[AdapterRef] = (), **options: Any
    ) -> None:
        self.lines: list[str] = []
        self.clients: list[ZmqClient] = []
        self.words = words
        config = EngineConfig.from_flat(model="fake")
        settings = SupervisorOptions(**{**QUICK, **options})
        self.spare = SpareEngine(COMMAND, self.lines.append)
        spare = self.spare if with_spare else NO_SPARE
        self.observer = PrometheusObserver("fake")
        self.supervisor = EngineSupervisor(
            config,
            text_model(),
            settings,
            observer=self.observer,
            launch=self._launch,
            spare=spare,
            adapters=adapters,
        )

    def _launch(self, config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        config = EngineConfig.from_flat(model=self.words)
        child = self.spare.take()
        client = ZmqClient(config, command=COMMAND, child=child, on_phase=on_phase, take_line=self.lines.append)
        self.clients.append(client)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look whenever the event loop has something new."""

        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(look(), LIMIT)

    async def until_status(self, status: str) -> None:
        await self.until(lambda: self.supervisor.health().status == status)


@asynccontextmanager
async def keeper(words: str = "long", **options: Any) -> AsyncIterator[Keeper]:
    """A started one; in the end no process may be left."""
    kept = Keeper(words, **options)
    try:
        await asyncio.wait_for(kept.supervisor.start(), LIMIT)
        yield kept
    finally:
        watches = [Watch(client.pid) for client in kept.clients if not client.is_dead]
        await kept.supervisor.stop()
        for watch in watches:
            watch.wait()


async def complete(supervisor: EngineSupervisor, token_ids: list[int], max_tokens: int = 8) -> list[int]:
    last: RequestOutput | None = None
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async for output in supervisor.engine.generate({"prompt_token_ids": token_ids}, params):
        last = output
    assert last is not None
    return last.outputs[0].token_ids


def expected(token_ids: list[int], max_tokens: int = 8) -> list[int]:
    return generate_alone(request("x", token_ids, max_tokens), 4096)[0]


async def test_before_the_start_and_after_it() -> None:
    kept = Keeper("long")
    supervisor = kept.supervisor
    assert supervisor.health().status == "starting"
    assert supervisor.engine_pid is None
    with pytest.raises(EngineUnavailableError, match="starting") as refused:
        _ = supervisor.engine
    assert refused.value.retry_after > 0
    await asyncio.wait_for(supervisor.start(), LIMIT)
    assert supervisor.health().status == "ready"
    assert await complete(supervisor, [1, 2, 3]) == expected([1, 2, 3])
    assert supervisor.stats.num_blocks > 0
    assert supervisor.stats.num_free_blocks == supervisor.stats.num_blocks
    assert supervisor.num_restarts == 0
    watch = Watch(kept.clients[0].pid)
    await supervisor.stop()
    watch.wait()
    assert supervisor.health().status == "stopped"
    await supervisor.stop()


async def test_health_tells_what_a_start_is_busy_with() -> None:
    kept = Keeper("hang-at-start")
    starting = asyncio.create_task(kept.supervisor.start())
    await kept.until(lambda: kept.supervisor.health().detail == "loading: import")
    assert kept.supervisor.health().status == "starting"
    watch = Watch(kept.clients[0].pid)
    await kept.supervisor.stop()
    watch.wait()
    with pytest.raises(EngineDeadError, match="stopped before"):
        await starting


async def test_adapters_are_read_before_the_first_request_and_a_damaged_one_ends_the_start() -> None:
    whole = [AdapterRef(str(index), str(index), "whole") for index in range(3)]
    async with keeper(adapters=whole) as kept:
        assert kept.supervisor.health().status == "ready"
        await kill_engine(kept)
    kept = Keeper("long", adapters=[*whole, AdapterRef("towns", "digest", DAMAGED)])
    try:
        with pytest.raises(EngineStartError, match="lora_modules has 'towns': damaged is truncated; download it"):
            await asyncio.wait_for(kept.supervisor.start(), LIMIT)
        assert len(kept.clients) == 1, "to start again would not help"
    finally:
        await kept.supervisor.stop()


async def kill_engine(kept: Keeper) -> None:
    """Kill the engine that serves; comes back when another does."""
    count, watch = len(kept.clients), Watch(kept.clients[-1].pid)
    os.kill(kept.clients[-1].pid, signal.SIGKILL)
    await kept.until(lambda: len(kept.clients) > count)
    await kept.until(lambda: kept.supervisor.health().status in ("ready", "draining"))
    watch.wait()


async def test_32_streams_go_on_over_three_kills_that_count_as_none() -> None:
    async with keeper("long,slow", max_restarts=0) as kept:
        supervisor = kept.supervisor
        streams = [asyncio.create_task(complete(supervisor, [5, i], 200 + i)) for i in range(32)]
        for generation in range(3):
            await kept.until(lambda: supervisor.stats.num_running == 32)
            assert supervisor.health().num_requests == 32
            await kill_engine(kept)
            assert supervisor.num_restarts == generation + 1
        answers = await asyncio.wait_for(asyncio.gather(*streams), LIMIT)
        assert answers == [expected([5, i], 200 + i) for i in range(32)]
        found = scrape(kept.observer)
        assert found.get("engine_up") == 1
        assert found.get("engine_restarts_total") == 3
        assert found.get("requests_resumed_total") == 3 * 32
        assert found.get("generation_tokens_total") == sum(map(len, answers))
        assert found.get("prompt_tokens_total") == 2 * 32
        assert found.get("request_success_total", finished_reason="length") == 32
        assert found.get("request_success_total", finished_reason="error") == 0
        assert supervisor.stats.num_free_blocks == supervisor.stats.num_blocks
        assert await complete(supervisor, [1, 2]) == expected([1, 2])


async def test_requests_that_come_while_it_restarts_wait_and_health_says_why() -> None:
    async with keeper(restart_backoff=3600.0, max_backoff=3600.0) as kept:
        os.kill(kept.clients[0].pid, signal.SIGKILL)
        await kept.until_status("restarting")
        assert "SIGKILL" in kept.supervisor.health().detail
        stream = asyncio.create_task(complete(kept.supervisor, [1]))
        await kept.until(lambda: kept.supervisor.health().num_requests == 1)
        draining = asyncio.create_task(kept.supervisor.drain())
        await kept.until_status("draining")
        with pytest.raises(EngineUnavailableError, match="draining"):
            await complete(kept.supervisor, [1])
        await kept.supervisor.stop()
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream
        assert await draining is True


async def test_an_engine_that_is_killed_while_it_starts_is_started_again() -> None:
    async with keeper("long,slow") as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [7, 8], 300))
        await kept.until(lambda: kept.supervisor.stats.num_running == 1)
        kept.words = "hang-at-start"
        os.kill(kept.clients[0].pid, signal.SIGKILL)
        await kept.until(lambda: kept.supervisor.health().detail == "loading: import")
        kept.words = "long"
        os.kill(kept.clients[1].pid, signal.SIGKILL)
        assert await asyncio.wait_for(stream, LIMIT) == expected([7, 8], 300)
        assert len(kept.clients) == 3


async def test_streams_end_with_the_cause_when_it_is_given_up() -> None:
    async with keeper("long,slow", max_restarts=1) as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [7, 8], 4000))
        await kept.until(lambda: kept.supervisor.stats.num_running == 1)
        kept.words = "die-at-start"
        os.kill(kept.clients[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="about to die"):
            await asyncio.wait_for(stream, LIMIT)
        assert kept.supervisor.health().status == "failed"


async def test_an_engine_whose_outputs_nobody_reads_any_more_is_replaced() -> None:
    async with keeper(stall_timeout=0.1) as kept:
        engine = kept.supervisor.engine
        assert await complete(kept.supervisor, [1, 2]) == expected([1, 2])
        (reader,) = (task for task in asyncio.all_tasks() if task.get_name() == "quire-outputs")
        reader.cancel()
        await kept.until(lambda: engine.is_dead)
        await kept.until(lambda: kept.supervisor.health().status == "ready" and kept.supervisor.engine is not engine)
        assert await complete(kept.supervisor, [1, 2]) == expected([1, 2])


async def test_who_loses_the_device_twice_is_refused_and_the_engine_lives_on() -> None:
    async with keeper(max_restarts=1) as kept:
        for round in range(2):
            with pytest.raises(GenerationError, match=r"died twice .* before its first token.*device failed"):
                await asyncio.wait_for(complete(kept.supervisor, [STICKY]), LIMIT)
            await kept.until(lambda round=round: len(kept.clients) == 2 * round + 3)  # type: ignore[misc]
            assert await complete(kept.supervisor, [3]) == expected([3])


async def test_among_many_only_the_request_that_kills_is_refused() -> None:
    async with keeper("long") as kept:
        streams = [asyncio.create_task(complete(kept.supervisor, [5, i], 20)) for i in range(3)]
        streams.append(asyncio.create_task(complete(kept.supervisor, [EXIT], 20)))
        streams += [asyncio.create_task(complete(kept.supervisor, [6, i], 20)) for i in range(3)]
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), LIMIT)
        assert isinstance(results.pop(3), GenerationError)
        assert results == [expected([a, i], 20) for a in (5, 6) for i in range(3)]
        assert kept.supervisor.health().status != "failed"


async def test_repeated_death_is_given_up_with_the_cause() -> None:
    async with keeper(max_restarts=2) as kept:
        kept.words = "die-at-start"
        os.kill(kept.clients[0].pid, signal.SIGKILL)
        error = await asyncio.wait_for(kept.supervisor.wait_failed(), LIMIT)
        assert "exited with status 3; its last line was: about to die" in str(error)
        assert len(kept.clients) == 3
        assert kept.supervisor.health().status == "failed"
        assert "about to die" in kept.supervisor.health().detail
        with pytest.raises(EngineUnavailableError, match="failed"):
            _ = kept.supervisor.engine
        assert await kept.supervisor.drain() is True
        await kept.supervisor.stop()
        assert kept.supervisor.health().status == "failed"


async def test_deaths_long_ago_do_not_count() -> None:
    async with keeper(max_restarts=1, restart_window=0.0) as kept:
        for generation in range(3):
            os.kill(kept.clients[-1].pid, signal.SIGKILL)
            await kept.until(lambda generation=generation: len(kept.clients) == generation + 2)  # type: ignore[misc]
            await kept.until_status("ready")
        assert kept.supervisor.num_restarts == 3


async def test_a_first_start_that_keeps_failing_raises() -> None:
    kept = Keeper("die-at-start", max_restarts=1)
    with pytest.raises(EngineDeadError, match="about to die"):
        await asyncio.wait_for(kept.supervisor.start(), LIMIT)
    assert len(kept.clients) == 2
    await kept.supervisor.stop()


async def test_a_wrong_model_is_not_tried_twice() -> None:
    kept = Keeper("fail-at-start")
    with pytest.raises(EngineStartError, match="no model"):
        await asyncio.wait_for(kept.supervisor.start(), LIMIT)
    assert len(kept.clients) == 1
    assert kept.supervisor.num_restarts == 0
    assert str(await kept.supervisor.wait_failed()) == str(kept.supervisor.health().detail)
    await kept.supervisor.stop()


async def test_an_engine_that_cannot_be_launched_is_given_up() -> None:
    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        return ZmqClient(config, command=("/no/such/python",))

    options = SupervisorOptions(**QUICK, max_restarts=1)
    supervisor = EngineSupervisor(EngineConfig.from_flat(model="x"), text_model(), options, launch=launch)
    with pytest.raises(EngineDeadError, match=r"cannot be launched.*/no/such/python"):
        await supervisor.start()
    await supervisor.stop()


async def test_a_stalled_engine_is_told_by_health_and_asked_for_its_stacks_once() -> None:
    async with keeper(stall_timeout=0.05) as kept:
        supervisor = kept.supervisor
        stream = asyncio.create_task(complete(supervisor, [STALL]))
        await kept.until_status("stalled")
        assert "no step has finished" in supervisor.health().detail
        await kept.until(lambda: any("fake_engine.py" in line and "execute" in line for line in kept.lines))
        await kept.until(lambda: kept.clients[0].seconds_without_step() > 0.3)  # many looks later
        assert sum("most recent call first" in line and "Current" in line for line in kept.lines) == 1
        await supervisor.stop()
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream


async def test_a_stalled_engine_is_replaced_and_who_stalls_it_twice_is_refused() -> None:
    async with keeper(stall_timeout=0.2, stacks_grace=0.05) as kept:
        with pytest.raises(GenerationError, match=r"died twice.*stalled: requests wait and no step has finished"):
            await asyncio.wait_for(complete(kept.supervisor, [STALL]), LIMIT)
        assert await asyncio.wait_for(complete(kept.supervisor, [3]), LIMIT) == expected([3])
        assert len(kept.clients) == 3


@pytest.mark.parametrize("word", ["changing", "paused"])
async def test_a_change_may_be_slow_but_not_for_ever(word: str) -> None:
    """A pause may. Requests that come meanwhile wait, and go on in the next engine."""
    async with keeper("long,slow", stall_timeout=0.1, change_patience=4.0, stacks_grace=0.05) as kept:
        supervisor = kept.supervisor
        before = asyncio.create_task(complete(supervisor, [1], 300))  # its steps are progress, for 0.6 s and more
        if word == "paused":
            supervisor.wanted.is_paused = True
        else:
            supervisor.wanted.is_changing, supervisor.wanted.changing_since = True, time.monotonic()
        assert await before == expected([1], 300)
        assert supervisor.health().status == word
        stream, since = asyncio.create_task(complete(supervisor, [STALL])), time.monotonic()
        if word == "paused":
            await kept.until(lambda: supervisor.engine.num_requests == 1)
            await kept.until(lambda: time.monotonic() > since + 0.6)  # more than the limit of a change
            assert supervisor.health().status == "paused"
            assert len(kept.clients) == 1
            stream.cancel()
            return
        await kept.until_status("stalled")
        assert "is being changed and does not end" in supervisor.health().detail
        await kept.until(lambda: len(kept.clients) == 2)
        supervisor.wanted.is_changing = False
        assert any("most recent call first" in line for line in kept.lines)
        with pytest.raises(GenerationError, match="died twice"):
            await asyncio.wait_for(stream, LIMIT)


async def test_a_stopped_engine_is_replaced_in_five_seconds_and_its_streams_go_on() -> None:
    async with keeper("long,slow") as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [3], 600))
        await kept.until(lambda: kept.clients[0].stats.num_running == 1)
        begin = time.monotonic()
        os.kill(kept.clients[0].pid, signal.SIGSTOP)
        await kept.until_status("restarting")
        assert time.monotonic() - begin < 8.0, "4 s, and what a busy machine adds"
        assert "stands still: it gave no heartbeat for 4 s" in kept.supervisor.health().detail
        assert await asyncio.wait_for(stream, LIMIT) == expected([3], 600)


async def test_of_replicas_the_one_that_stalls_is_replaced_alone() -> None:
    config = EngineConfig.from_flat(model="long,slow")

    def launch(_: EngineConfig, on_phase: OnPhase) -> ReplicaClient:
        return ReplicaClient(2, lambda index, count: ZmqClient(config, command=COMMAND))

    options = SupervisorOptions(stall_timeout=0.5, stacks_grace=0.05)
    supervisor = EngineSupervisor(config, text_model(), options, launch=launch)
    try:
        await asyncio.wait_for(supervisor.start(), LIMIT)
        client = supervisor._client
        assert isinstance(client, ReplicaClient)
        streams = [asyncio.create_task(complete(supervisor, [3 + index] * 20, 600)) for index in range(2)]
        victim, other = pids(client)
        while client.stats.num_running < 2:
            await asyncio.sleep(0.01)
        os.kill(victim, signal.SIGSTOP)
        for index, stream in enumerate(streams):
            assert await asyncio.wait_for(stream, LIMIT) == expected([3 + index] * 20, 600)
        assert supervisor.health().status == "ready"
        assert supervisor.health().num_restarts == 0
        assert other in pids(client)
        assert victim not in pids(client)
    finally:
        await supervisor.stop()


async def test_an_engine_without_requests_or_with_steps_is_not_stalled() -> None:
    async with keeper("long,slow", stall_timeout=0.2) as kept:
        assert await complete(kept.supervisor, [1], 200) == expected([1], 200)  # takes 0.4 s and more
        assert kept.supervisor.health().status == "ready"
        assert not any("most recent call" in line for line in kept.lines)


async def test_a_drain_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    async with keeper("long,slow", drain_timeout=0.3, drain_interval=0.05) as kept:
        streams = [asyncio.create_task(complete(kept.supervisor, [1, i], 4000)) for i in range(6)]
        await kept.until(lambda: kept.supervisor.stats.num_running == 6)
        first = kept.supervisor.engine.request_ids[0]
        assert await kept.supervisor.drain() is False
        await kept.supervisor.stop()
        await asyncio.gather(*streams, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records if "6 requests" in record.getMessage()]
    assert len(said) >= 3  # it is said again
    assert said[0].startswith(f"waiting at most 0 s for 6 requests ({first}, ")
    assert said[0].endswith(" and 2 more) to finish")
    assert said[-1].endswith("did not finish in time and will be cut off")


async def test_a_drain_says_what_keeps_requests_from_running(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    async with keeper("long,slow", drain_timeout=0.1) as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [1], 4000))
        await kept.until(lambda: kept.supervisor.stats.num_running == 1)
        kept.supervisor.wanted.is_paused = True
        assert await kept.supervisor.drain() is False
        await kept.supervisor.stop()
        await asyncio.gather(stream, return_exceptions=True)
    (said,) = [record.getMessage() for record in caplog.records if "waiting at most" in record.getMessage()]
    assert said.endswith("to finish while the engine is paused (an operator has paused it; requests wait)")


async def test_a_drain_of_an_idle_engine_has_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    async with keeper() as kept:
        assert await kept.supervisor.drain() is True
    assert not any("waiting at most" in record.getMessage() for record in caplog.records)


async def test_drain_lets_streams_end_and_takes_no_more() -> None:
    async with keeper("long,slow") as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [1, 2], 40))
        await kept.until(lambda: kept.supervisor.stats.num_running == 1)
        draining = asyncio.create_task(kept.supervisor.drain())
        await kept.until_status("draining")
        with pytest.raises(EngineUnavailableError, match="draining"):
            await complete(kept.supervisor, [1])
        assert await draining is True
        assert await stream == expected([1, 2], 40)


async def test_drain_has_a_limit_after_which_streams_are_cut_off() -> None:
    async with keeper("long,slow", drain_timeout=0.02) as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [1, 2], 4000))
        await kept.until(lambda: kept.supervisor.stats.num_running == 1)
        assert await kept.supervisor.drain() is False
        await asyncio.gather(kept.supervisor.stop(), kept.supervisor.stop())
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream


async def test_an_engine_that_dies_while_draining_is_replaced_for_the_streams_that_are_open() -> None:
    async with keeper("long,slow") as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [1, 2], 400))
        await kept.until(lambda: kept.supervisor.stats.num_running == 1)
        draining = asyncio.create_task(kept.supervisor.drain())
        await kept.until_status("draining")
        await kill_engine(kept)
        assert kept.supervisor.health().status == "draining"
        assert await asyncio.wait_for(stream, LIMIT) == expected([1, 2], 400)
        assert await asyncio.wait_for(draining, LIMIT) is True
        watch = Watch(kept.clients[1].pid)
        os.kill(kept.clients[1].pid, signal.SIGKILL)
        watch.wait()
        task = kept.supervisor._task
        assert task is not None
        await asyncio.wait_for(asyncio.wait([task]), LIMIT)
        assert len(kept.clients) == 2  # nobody needs another


def test_backoff_doubles_up_to_its_limit() -> None:
    options = SupervisorOptions(restart_backoff=0.5, max_backoff=3.0)
    assert [backoff(options, deaths) for deaths in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_a_spare_takes_over_and_the_next_is_launched_when_its_engine_is_idle() -> None:
    async with keeper("long,slow", with_spare=True, spare_delay=0.01) as kept:
        supervisor, spare = kept.supervisor, kept.spare
        await kept.until(lambda: spare.pid is not None)
        first = spare.pid
        stream = asyncio.create_task(complete(supervisor, [5, 6], 300))
        await kept.until(lambda: supervisor.stats.num_running == 1)
        await kill_engine(kept)
        assert supervisor.engine_pid == first
        assert await stream == expected([5, 6], 300)
        assert await complete(supervisor, [1, 2]) == expected([1, 2])
        await kept.until(lambda: spare.pid is not None)
        assert spare.pid != first


async def test_no_spare_is_launched_while_requests_run_but_at_last_under_endless_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    wait = asyncio.sleep

    async def look(seconds: float) -> None:
        nonlocal looks
        looks += seconds == 0.123
        await wait(0.001)

    monkeypatch.setattr("quire.server.supervisor.asyncio.sleep", look)
    async with keeper("long,slow", with_spare=True, spare_delay=0.123) as kept:
        stream = asyncio.create_task(complete(kept.supervisor, [5, 6], 4000))
        await kept.until(lambda: kept.spare.pid is not None)
        assert looks == 12
        stream.cancel()


async def test_the_spare_ends_with_the_supervisor() -> None:
    async with keeper(with_spare=True, spare_delay=0.001) as kept:
        await kept.until(lambda: kept.spare.pid is not None)
        assert kept.spare.pid is not None
        watch = Watch(kept.spare.pid)
    watch.wait()
    assert kept.spare.pid is None
