"""RelayEngine over a fake client: outputs go to whoever asked, and what a dead process had open is aborted."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.client import AsyncClient
from quire.metrics.stats import NULL_OBSERVER
from quire.server.processes.messages import StreamsEnded, ToApi
from quire.server.processes.relay import RelayEngine
from quire.types.messages import Command, EngineInfo, Reply
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from tests.engine.processes import request
from tests.server.scripted import TEXT


class Client(AsyncClient):
    """Hands out what a test says."""

    def __init__(self) -> None:
        self.info = EngineInfo(300, 64, 16, 100, 8)
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.outputs: asyncio.Queue[EngineOutputs] = asyncio.Queue()

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def get_outputs_async(self) -> EngineOutputs:
        return await self.outputs.get()

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = None) -> None:
        self.calls.append(verb)

    def has_unfinished(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


class Process:
    def __init__(self) -> None:
        self.heard: list[ToApi] = []

    def send(self, message: ToApi) -> None:
        self.heard.append(message)

    @property
    def outputs(self) -> list[tuple[str, str | None]]:
        batches = [message for message in self.heard if isinstance(message, EngineOutputs)]
        return [(output.request_id, output.finish_reason) for batch in batches for output in batch.outputs]


async def say(client: Client, *outputs: EngineOutput) -> None:
    client.outputs.put_nowait(EngineOutputs(list(outputs), EngineStats()))
    while not client.outputs.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def relay() -> tuple[RelayEngine, Client, Process, Process]:
    client = Client()
    return RelayEngine(client, TEXT, observer=NULL_OBSERVER), client, Process(), Process()


async def test_outputs_go_to_the_process_that_asked() -> None:
    engine, client, first, second = relay()
    engine.relay(request("a"), first)
    engine.relay(request("b"), second)
    assert engine.num_requests == 2
    await say(client, EngineOutput("a", [1]), EngineOutput("b", [2], finish_reason="length"))
    assert first.outputs == [("a", None)]
    assert second.outputs == [("b", "length")]
    assert engine.request_ids == ["a"]
    await say(client, EngineOutput("a", [], finish_reason="error", error="no"))
    await asyncio.wait_for(engine.wait_idle(), 5)
    engine.shutdown()


async def test_a_process_ends_its_own_requests_only() -> None:
    engine, client, first, second = relay()
    engine.relay(request("a"), first)
    engine.relay_abort(["a"], second)
    assert client.aborted == []
    engine.relay_abort(["a", "unknown"], first)
    assert client.aborted == ["a"]
    engine.shutdown()


async def test_an_id_that_another_process_has_open_is_refused() -> None:
    engine, client, first, second = relay()
    engine.relay(request("a"), first)
    engine.relay(request("a"), second)
    assert [one.request_id for one in client.requests] == ["a"]
    assert second.outputs == [("a", "error")]
    await say(client, EngineOutput("a", [1]))
    assert first.outputs == [("a", None)]
    engine.shutdown()


async def test_what_a_dead_process_had_open_is_aborted_and_its_last_words_go_nowhere() -> None:
    engine, client, first, second = relay()
    engine.relay(request("a"), first)
    engine.relay(request("b"), second)
    engine.forget(first)
    assert client.aborted == ["a"]
    assert engine.num_requests == 2  # the engine has not said that it has ended
    await say(client, EngineOutput("a", [], finish_reason="abort"), EngineOutput("b", [5]))
    assert first.heard == []
    assert engine.request_ids == ["b"]
    engine.shutdown("it is over")
    assert second.heard[-1] == StreamsEnded("it is over")
    assert first.heard == []
    assert engine.num_requests == 0


async def test_the_vocabulary_is_set_once_whoever_asks() -> None:
    engine, client, first, second = relay()
    await engine.obey(Command(7, "set_vocabulary"), first)
    await engine.obey(Command(9, "set_vocabulary"), second)
    assert (first.heard, second.heard) == ([Reply(7)], [Reply(9)])
    assert client.calls.count("set_vocabulary") <= 1
    engine.shutdown()


async def test_after_its_end_nothing_is_passed_on() -> None:
    engine, client, first, _ = relay()
    engine.shutdown("over")
    engine.relay(request("a"), first)
    engine.relay_abort(["a"], first)
    engine.forget(first)
    assert (client.requests, client.aborted) == ([], [])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.get_outputs_async(), 0.01)
