"""The console's stream: what it says, what it costs the engine, and that it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from quire.metrics.stats import CompletionEnd, RequestEnd, TokenEvent
from quire.server.console.feed import MOST_READERS, ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor, LogTail, Marks, percentiles
from quire.types.errors import QueueFullError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineStats
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import FakeClient
from tests.server.console.engines import WatchedEngine
from tests.server.helpers import FakeProvider, http

INFO = EngineInfo(100, 64, 16, 8, 4)


async def frames(feed: ConsoleFeed, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(20), aclosing(feed.lines()) as lines:
        return [json.loads(await anext(lines)) for _ in range(count)]


async def ended(feed: ConsoleFeed) -> None:
    """Wait until nobody is looked at any more."""
    async with asyncio.timeout(20):
        while feed._task is not None:
            await asyncio.sleep(0)


async def test_a_stream_over_a_real_engine(tmp_path: Path) -> None:
    engine = WatchedEngine(tmp_path, step_seconds=0.002, shows_text=True)
    engine.may_compile.set()
    app = engine.app()
    async with http(app) as session:
        answers = [
            asyncio.create_task(
                session.post("/v1/completions", json={"prompt": f"prompt {i}", "max_tokens": 100, "ignore_eos": True})
            )
            for i in range(6)
        ]
        found = await frames(engine.feed, 8)
        for answer in answers:
            assert (await answer).status_code == 200
        hello, views = found[0], [frame["engine"] for frame in found[1:]]
        assert hello["type"] == "hello"
        assert hello["engine"]["max_num_seqs"] == 4
        assert all(frame["type"] == "frame" and frame["status"] == "ready" for frame in found[1:])
        requests = [request for view in views for request in view["requests"]]
        assert {"decode", "queued"} <= {request["phase"] for request in requests}
        assert {request["prompt"] for request in requests} == {f"prompt {i}" for i in range(6)}
        steps = [step for view in views for step in view["steps"]]
        assert [step[0] for step in steps] == sorted({step[0] for step in steps}), "a step is told twice"
        assert {step[6] for step in steps} <= {"kernel list", "eager"}
        assert {line[0] for line in views[0]["memory"]} >= {"weights", "KV blocks"}
        assert engine.core.watch is not None
        last = (await frames(engine.feed, 2))[0]
        assert {one["reason"] for one in last["ended"]} == {"length"}
        await ended(engine.feed)
        assert type(engine.core.watch).__name__ == "StepLog", "the engine still records"
    engine.engine.shutdown()


async def test_prompts_are_shown_only_where_it_was_asked_for(tmp_path: Path) -> None:
    engine = WatchedEngine(tmp_path, step_seconds=0.002)
    async with http(engine.app()) as session:
        body = {"prompt": "a secret", "max_tokens": 60, "ignore_eos": True}
        answer = asyncio.create_task(session.post("/v1/completions", json=body))
        found = await frames(engine.feed, 4)
        await answer
    assert any(frame["engine"]["requests"] for frame in found[1:])
    assert "a secret" not in json.dumps(found)
    await ended(engine.feed)
    engine.engine.shutdown()


async def test_a_slow_reader_loses_frames_and_too_many_are_refused() -> None:
    feed = ConsoleFeed(FakeProvider(FakeClient()), ConsoleMonitor(), ("m",), interval=0.001)
    readers = [feed.lines() for _ in range(MOST_READERS)]
    for reader in readers:
        await anext(reader)
    with pytest.raises(QueueFullError, match="consoles are open"):
        await anext(feed.lines())
    first = [json.loads(await anext(readers[0])) for _ in range(20)]
    assert len(first) == 20
    late = json.loads(await anext(readers[1]))
    assert late["at"] > first[10]["at"], "old frames were kept for a reader that does not read"
    for reader in readers:
        await reader.aclose()
    await ended(feed)


async def test_an_engine_that_is_away_is_told_with_the_requests_that_it_left() -> None:
    provider = FakeProvider(FakeClient())
    stream = provider.engine.generate("waiting", SamplingParams(max_tokens=5), "mine", announce=True)
    await anext(stream)
    held = provider.engine.held_requests("the engine is restarting")
    assert [(one.id, one.phase, one.why) for one in held] == [("mine", "held", "the engine is restarting")]
    assert provider.engine.prompt_of("mine") == "waiting"
    await stream.aclose()
    assert provider.engine.prompt_of("mine") is None
    provider.unavailable, provider.status = "it died", "restarting"
    feed = ConsoleFeed(provider, ConsoleMonitor(), ("m",), interval=0.01)
    hello, frame = await frames(feed, 2)
    assert hello["engine"] is None
    assert (frame["status"], frame["engine"]["requests"]) == ("restarting", [])
    await ended(feed)


async def test_streams_end_with_the_server() -> None:
    is_ending = False
    feed = ConsoleFeed(
        FakeProvider(FakeClient()), ConsoleMonitor(), ("m",), interval=0.01, is_ending=lambda: is_ending
    )
    told = 0
    async with asyncio.timeout(20):
        async for _ in feed.lines():
            told += 1
            is_ending = told > 3
    assert told > 3


def test_rates_latencies_and_ends() -> None:
    now = 1000.0
    monitor = ConsoleMonitor(clock=lambda: now)
    monitor.on_engine_start(INFO)
    marks = monitor.begin()[0]
    for second in range(5):
        now = 1001.0 + second
        monitor.on_stats(EngineStats(2, 1, 8, 4, prompt_tokens=100 * (second + 1)))
        monitor.on_tokens(TokenEvent(10, first_token_latencies=[0.5], token_latencies={0.1: 8, 0.3: 2}))
    load = monitor.load(marks)
    assert (load.running, load.waiting, load.kv_usage) == (2, 1, 0.5)
    assert (load.prompt_rate, load.generation_rate) == (100.0, 10.0)
    assert (load.ttft.p50, load.itl.p50, load.itl.p90, load.itl.count) == (0.5, 0.1, 0.3, 50)
    assert [sample.generation_rate for sample in monitor.history()] == [10.0] * 4
    end = CompletionEnd("stop", 11, 3.0, 4.0)
    monitor.on_request_end(RequestEnd("a", SamplingParams(), 7, (end,), 2.0, 4.5, 3.0, 0.25, 4))
    ((one,), _, restarts) = monitor.news(marks)
    assert (one.reason, one.ttft, one.itl, one.queue, one.since) == ("stop", 1.0, 0.1, 0.25, now - 2.5)
    monitor.on_engine_down()
    monitor.on_engine_start(INFO)
    monitor.on_resume(3)
    assert [kind for _, kind, _ in monitor.news(marks)[2]] == ["down", "ready", "resumed"]
    assert monitor.load(marks).num_restarts == 1
    assert monitor.news(marks) == ([], [], [])
    assert restarts == []
    assert percentiles([(now - 100, 1.0, 1)], now).count == 0, "older than the window"


def test_the_log_tail_holds_no_prompts_and_the_engines_lines() -> None:
    printed: list[str] = []
    for shows_text in (False, True):
        tail = LogTail(shows_text=shows_text)
        record = logging.LogRecord("quire.server.generation.run", logging.INFO, "", 0, "prompt %r", ("secret",), None)
        tail.emit(record)
        tail.emit(logging.LogRecord("quire.server", logging.WARNING, "", 0, "told", (), None))
        take = tail.tee(printed.append)
        take("12:00:00 E it failed\n")
        take("not a log line\n")
        lines = [line[1:] for line in tail.lines]
        assert lines[-3:] == [("W", "told"), ("E", "it failed"), ("I", "not a log line")]
        assert (len(lines) == 4) == shows_text
    assert len(printed) == 4
    for _ in range(1000):
        tail.emit(logging.LogRecord("quire.server", logging.INFO, "", 0, "more", (), None))
    assert len(ConsoleMonitor().news(Marks())[1]) == 0
    assert len(tail.lines) == 400
