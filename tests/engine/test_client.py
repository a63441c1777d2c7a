"""The in-process client: one core behind a sync and an async face, asleep when idle, loud when it dies."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire.engine.client import InProcClient
from quire.engine.loop import EngineLoop
from quire.types.errors import EngineDeadError, EngineError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput
from tests.engine.test_core import MAX_LEN, Device, make_core, request
from tests.fakes import VOCAB_SIZE, generate_alone

INFO = EngineInfo(VOCAB_SIZE, MAX_LEN, 4, 65, 8)


def make_client() -> tuple[InProcClient, Device]:
    core, device = make_core()
    return InProcClient(core, EngineLoop(core, debug_checks=True), INFO), device


def joined(outputs: list[EngineOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def test_sync_face() -> None:
    client, _ = make_client()
    client.add_request(request("a"))
    client.add_request(request("b"))
    outputs = []
    while client.has_unfinished():
        outputs += client.get_outputs().outputs
    assert joined(outputs, "a") == generate_alone(request("a"), MAX_LEN)[0]
    assert joined(outputs, "b") == generate_alone(request("b"), MAX_LEN)[0]
    assert client.get_outputs().outputs == []


def test_sync_abort_is_answered_in_the_next_step() -> None:
    client, _ = make_client()
    client.add_request(request("a"))
    client.get_outputs()
    client.abort(["a", "unknown"])
    (output,) = client.get_outputs().outputs
    assert (output.request_id, output.finish_reason) == ("a", "abort")
    assert not client.has_unfinished()


async def test_async_face() -> None:
    client, _ = make_client()
    names = [str(i) for i in range(6)]
    for name in names:
        client.add_request(request(name))
    outputs: list[EngineOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < len(names):
        outputs += (await client.get_outputs_async()).outputs
    for name in names:
        assert joined(outputs, name) == generate_alone(request(name), MAX_LEN)[0]
    with pytest.raises(EngineError, match="asynchronously"):
        client.get_outputs()
    client.shutdown()


async def test_an_idle_engine_uses_no_processor() -> None:
    client, _ = make_client()
    client.add_request(request("a", max_tokens=1))
    await client.get_outputs_async()
    before = time.process_time()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.get_outputs_async(), timeout=0.3)
    assert time.process_time() - before < 0.05
    client.shutdown()


async def test_death_reaches_whoever_waits_and_whoever_comes_later() -> None:
    client, device = make_client()
    device.fake.poisoned, device.sticky = frozenset({"a"}), True
    client.add_request(request("a"))
    with pytest.raises(EngineDeadError, match="failed after"):
        await client.get_outputs_async()
    with pytest.raises(EngineDeadError):
        client.add_request(request("b"))
    with pytest.raises(EngineDeadError):
        await client.get_outputs_async()
    client.shutdown()


async def test_shutdown_wakes_a_waiting_reader() -> None:
    client, _ = make_client()
    reader = asyncio.create_task(client.get_outputs_async())
    await asyncio.sleep(0)
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(reader, timeout=5)
    client.shutdown()
