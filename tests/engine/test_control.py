"""Control messages: each gets one reply, with its result or its error, whatever else the engine is busy with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.client import InProcClient
from quire.engine.control import VERBS, Verb, obey
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.types.errors import EngineDeadError, EngineError, RequestError
from quire.types.messages import AbortRequests, Command, Reply
from quire.types.outputs import EngineOutput, EngineStats
from quire.types.request import EngineRequest
from quire.types.structured import Vocabulary
from tests.engine.processes import launch
from tests.engine.test_client import INFO
from tests.engine.test_core import MAX_LEN, make_core, request
from tests.engine.test_parked import make as make_parking
from tests.fakes import generate_alone

LIMIT = 20.0
VOCABULARY = Vocabulary([b"a", b"", b"\xff"], [1], [1])


def _break(core: EngineCore, argument: str) -> None:
    if argument == "user":
        raise RequestError("there is no such thing; name another")
    if argument == "dead":
        raise EngineDeadError("it cannot go on")
    raise ZeroDivisionError("a bug")


@pytest.fixture(autouse=True, scope="module")
def verbs() -> Iterator[None]:
    """A verb is a line: these two are added here, and nothing else knows them."""
    stats = Verb(lambda core, _: core.stats(), result=EngineStats)
    with VERBS.with_entries({"stats": stats, "break": Verb(_break, str)}):
        yield


def make_client() -> InProcClient:
    core, _ = make_core()
    return InProcClient(core, EngineLoop(core, debug_checks=True), INFO)


def test_a_reply_holds_the_result_or_says_what_is_wrong() -> None:
    core, _ = make_core()
    core.add_request(request("a"))
    assert obey(core, Command(1, "stats")) == Reply(1, core.stats())
    assert obey(core, Command(2, "reset_prefix_cache")) == Reply(2)
    assert obey(core, Command(3, "break", "user")) == Reply(3, error="there is no such thing; name another")
    assert obey(core, Command(4, "break", "bug")) == Reply(4, error="ZeroDivisionError('a bug')")
    assert obey(core, Command(5, "break", 3)).error == "Expected `str`, got `int`"
    assert obey(core, Command(6, "dance")).error == f"unknown control verb 'dance'; known: {', '.join(sorted(VERBS))}"
    with pytest.raises(EngineDeadError):
        obey(core, Command(7, "break", "dead"))


def test_a_call_in_this_process_leaves_outputs_to_whoever_asks_for_them() -> None:
    client = make_client()
    client.add_request(request("a", length=MAX_LEN))  # refused without a step
    client.add_request(request("b"))
    assert client.call("stats").num_waiting == 1
    outputs: list[EngineOutput] = []
    while client.has_unfinished():
        outputs += client.get_outputs().outputs
    assert {output.request_id: output.finish_reason for output in outputs} == {"a": "error", "b": "length"}
    with pytest.raises(EngineError, match="refused 'break': ZeroDivisionError"):
        client.call("break", "bug")
    assert client.call("set_vocabulary", VOCABULARY) is None
    client.shutdown()
    with pytest.raises(EngineDeadError):
        client.call("stats")


async def test_calls_are_answered_while_streams_run() -> None:
    client = make_client()
    client.add_request(request("a", max_tokens=40))
    stats, broken = await asyncio.gather(
        client.call_async("stats"), client.call_async("break", "bug"), return_exceptions=True
    )
    assert isinstance(stats, EngineStats)
    assert isinstance(broken, EngineError)
    with pytest.raises(EngineError, match="use call_async"):
        client.call("stats")
    tokens: list[int] = []
    while len(tokens) < 40:
        tokens += [token for output in (await client.get_outputs_async()).outputs for token in output.token_ids]
    assert tokens == generate_alone(request("a", max_tokens=40), MAX_LEN)[0]
    client.shutdown()


async def test_a_call_ends_with_the_engine_and_none_begins_after_it() -> None:
    client = make_client()
    with pytest.raises(EngineDeadError, match="it cannot go on"):
        await asyncio.wait_for(client.call_async("break", "dead", limit=None), LIMIT)
    with pytest.raises(EngineDeadError, match="it cannot go on"):  # its outputs have not been asked for yet
        await asyncio.wait_for(client.call_async("stats", limit=None), LIMIT)
    client.shutdown()


async def test_a_call_that_takes_too_long_is_given_up_and_its_late_reply_is_nobodys() -> None:
    client = make_client()
    release = threading.Event()
    VERBS.register("wait", Verb(lambda core, _: release.wait(LIMIT)))
    with pytest.raises(EngineError, match=r"has not answered 'wait' within 0\.05 s"):
        await client.call_async("wait", limit=0.05)
    release.set()
    assert isinstance(await client.call_async("stats"), EngineStats)
    client.shutdown()


def test_calls_to_another_process() -> None:
    client = launch()
    client.wait_ready()
    assert client.call("set_vocabulary", VOCABULARY) is None
    with pytest.raises(EngineError, match="refused 'dance': unknown control verb 'dance'"):
        client.call("dance")
    with pytest.raises(EngineError, match="refused 'set_vocabulary': Expected `object`, got `int`"):
        client.call("set_vocabulary", 3)
    with pytest.raises(EngineError, match=r"has not answered 'reset_prefix_cache' within 0\.0 s"):
        client.call("reset_prefix_cache", limit=0.0)
    assert client.call("reset_prefix_cache") is None
    client.shutdown()


async def test_calls_to_another_process_from_an_event_loop() -> None:
    client = launch("slow")
    await client.wait_ready_async()
    client.add_request(request("a"))
    assert await asyncio.gather(*(client.call_async("reset_prefix_cache") for _ in range(10))) == [None] * 10
    with pytest.raises(EngineError, match="use call_async"):
        client.call("reset_prefix_cache")
    client._child.kill()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(client.call_async("reset_prefix_cache", limit=None), LIMIT)
    client.shutdown()


ACTIONS = ["add"] * 4 + ["run"] * 5 + ["ready"] * 3 + ["abort", "stats", "break", "dance", "reset_prefix_cache"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(depth=st.integers(1, 3), trace=st.lists(st.sampled_from(ACTIONS), max_size=50), data=st.data())
def test_commands_among_requests_change_no_answer(depth: int, trace: list[str], data: st.DataObject) -> None:
    core, adapter, _ = make_parking(depth)
    loop = EngineLoop(core, debug_checks=True)
    replies: list[Reply] = []
    loop.on_reply = replies.append
    sent: list[str] = []
    asked: dict[str, EngineRequest] = {}
    outputs: list[EngineOutput] = []
    for action in trace:
        if action == "add":
            name = data.draw(st.sampled_from(["x", "a"])) + str(len(asked))
            asked[name] = request(name, 3, 5)
            loop.submit(asked[name])
        elif action == "abort" and asked:
            loop.submit(AbortRequests([data.draw(st.sampled_from(sorted(asked)))]))
        elif action == "ready" and adapter.begun:
            name, future = adapter.begun.pop(data.draw(st.integers(0, len(adapter.begun) - 1)))
            future.set_result(name)
        elif action == "run" and loop.has_work():
            outputs += loop.run_once().outputs
        elif action in ("stats", "break", "dance", "reset_prefix_cache"):
            loop.submit(Command(len(sent), action, "bug" if action == "break" else None))
            sent.append(action)
    while loop.has_unfinished():
        while adapter.begun:
            name, future = adapter.begun.pop()
            future.set_result(name)
        outputs += loop.run_once().outputs
    assert [reply.id for reply in replies] == list(range(len(sent)))
    assert [reply.error is None for reply in replies] == [verb in ("stats", "reset_prefix_cache") for verb in sent]
    for name, one in asked.items():
        mine: list[Any] = [output for output in outputs if output.request_id == name]
        tokens = [token for output in mine for token in output.token_ids]
        expected = generate_alone(one, MAX_LEN)[0]
        assert [output.finish_reason is not None for output in mine] == [False] * (len(mine) - 1) + [True]
        assert tokens == (expected[: len(tokens)] if mine[-1].finish_reason == "abort" else expected)
