"""The engine as an API process sees it, against a parent that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq

from quire.engine.transport import Meeting, Receiver, Sender, make_meeting
from quire.metrics.stats import HttpEnd, TokenEvent
from quire.server.processes.client import EventsToParent, RelayedProvider
from quire.server.processes.messages import (
    Counted,
    Drain,
    Drained,
    Flush,
    Flushed,
    FromApi,
    Joined,
    ProviderState,
    Serving,
    StreamsEnded,
    ToApi,
)
from quire.types.errors import EngineDeadError, EngineUnavailableError
from quire.types.messages import AbortRequests, Command, EngineInfo, Reply
from quire.types.outputs import EngineOutput, EngineOutputs, RequestOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.server.scripted import TEXT

INFO = EngineInfo(300, 64, 16, 100, 8)
READY = ProviderState("ready", "it takes requests", 20, info=INFO, epoch=1)


class Parent:
    """The other side of a meeting."""

    def __init__(self) -> None:
        self.meeting: Meeting = make_meeting()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        decoder = msgspec.msgpack.Decoder(FromApi)
        self._receiver = Receiver(self._context, self.meeting.client, self.meeting.token, decoder)
        self.meeting = msgspec.structs.replace(self.meeting, client=self._receiver.endpoint)
        self._sender: Sender | None = None

    async def hear(self) -> FromApi:
        async with asyncio.timeout(5):
            while (message := self._receiver.receive()) is None:
                await asyncio.sleep(0.001)
        if isinstance(message, Joined):
            self._sender = Sender(self._context, message.endpoint, self.meeting.token)
        return message

    def say(self, message: ToApi) -> None:
        assert self._sender is not None
        self._sender.send(message)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._receiver.close()
        self._context.term()
        self.meeting.remove()


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.close()


async def begin(parent: Parent) -> RelayedProvider:
    """A provider that serves."""
    provider = RelayedProvider(parent.meeting)
    provider.attach(TEXT)
    assert isinstance(await parent.hear(), Joined)
    with pytest.raises(EngineUnavailableError):
        _ = provider.engine
    parent.say(READY)
    provider.note_listening()
    assert isinstance(await parent.hear(), Serving)
    return provider


async def test_a_stream_goes_through_the_parent_and_what_it_counts_too(parent: Parent) -> None:
    provider = await begin(parent)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    stream = provider.engine.generate({"prompt_token_ids": [5, 6]}, params, "a")
    reading = asyncio.ensure_future(collect(stream))
    sent = await parent.hear()
    assert isinstance(sent, EngineRequest)
    assert (sent.request_id, sent.token_ids) == ("a", [5, 6])
    parent.say(EngineOutputs([EngineOutput("a", [70])]))
    parent.say(EngineOutputs([EngineOutput("a", [71], finish_reason="length")]))
    assert await reading == [70, 71]
    parent.say(Flush(3))
    counted = await parent.hear()
    assert isinstance(counted, Counted)
    assert counted.tokens is not None
    assert counted.tokens.num_generation_tokens == 2
    assert [end.request_id for end in counted.requests] == ["a"]
    assert await parent.hear() == Flushed(3)
    provider.close()


async def collect(stream: AsyncIterator[RequestOutput]) -> list[int]:
    found: list[int] = []
    async for output in stream:
        found = output.outputs[0].token_ids
    return found


async def test_streams_that_no_engine_will_finish_end_with_the_reason_and_are_aborted(parent: Parent) -> None:
    provider = await begin(parent)
    reading = asyncio.ensure_future(collect(provider.engine.generate({"prompt_token_ids": [5]}, None, "a")))
    assert isinstance(await parent.hear(), EngineRequest)
    parent.say(StreamsEnded("it is gone"))
    with pytest.raises(EngineDeadError, match="it is gone"):
        await reading
    assert await parent.hear() == AbortRequests(["a"])
    parent.say(msgspec.structs.replace(READY, epoch=2))
    async with asyncio.timeout(5):
        while True:
            try:
                assert not provider.engine.is_dead
                break
            except EngineUnavailableError:
                await asyncio.sleep(0.001)
    provider.close()


async def until_refused(provider: RelayedProvider) -> None:
    while True:
        _ = provider.engine
        await asyncio.sleep(0.001)


async def test_a_drain_refuses_and_waits_for_open_streams(parent: Parent) -> None:
    provider = await begin(parent)
    reading = asyncio.ensure_future(collect(provider.engine.generate({"prompt_token_ids": [5]}, None, "a")))
    assert isinstance(await parent.hear(), EngineRequest)
    parent.say(Drain("the engine is draining"))
    with pytest.raises(EngineUnavailableError, match="draining"):
        await asyncio.wait_for(until_refused(provider), 5)
    parent.say(EngineOutputs([EngineOutput("a", [70], finish_reason="length")]))
    assert await reading == [70]
    assert await parent.hear() == Drained()
    provider.close()


async def test_the_vocabulary_is_asked_for_and_not_sent(parent: Parent) -> None:
    provider = await begin(parent)
    asking = asyncio.ensure_future(provider.engine.prepare_structured_outputs())
    if provider.engine._inputs.takes_grammars:
        command = await parent.hear()
        assert isinstance(command, Command)
        assert (command.verb, command.argument) == ("set_vocabulary", None)
        parent.say(Reply(command.id))
    await asking
    provider.close()


async def test_why_requests_are_refused_is_what_the_parent_says(parent: Parent) -> None:
    provider = await begin(parent)
    asleep = msgspec.structs.replace(READY, status="asleep", unavailable="it sleeps", retry_after=7.0)
    parent.say(asleep)
    async with asyncio.timeout(5):
        while provider.health().status != "asleep":
            await asyncio.sleep(0.001)
    with pytest.raises(EngineUnavailableError, match="it sleeps") as refused:
        _ = provider.engine
    assert refused.value.retry_after == 7.0
    provider.close()


def test_events_are_summed_until_they_are_taken() -> None:
    events = EventsToParent()
    assert events.take() is None
    events.on_tokens(TokenEvent(2, 5, 1, [0.5], {0.1: 2}))
    events.on_tokens(TokenEvent(1, 0, 0, [0.25], {0.1: 1, 0.2: 1}))
    events.on_http_end(HttpEnd("GET", "/health", 200, 0.1))
    counted = events.take()
    assert counted is not None
    assert counted.tokens == TokenEvent(3, 5, 1, [0.5, 0.25], {0.1: 3, 0.2: 1})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counted), type=Counted) == counted
    assert events.take() is None
