"""The client of an engine process: the same answers as in this process, on both faces, and death told at once."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from quire.config.engine import EngineConfig
from quire.engine import zmq_client
from quire.engine.client import make_inproc_client
from quire.engine.zmq_client import ZmqClient
from quire.frontend.llm import LLM
from quire.types.errors import EngineDeadError, EngineError
from quire.types.messages import StartupPhase
from quire.types.outputs import EngineOutput
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import VOCAB, make_model
from tests.engine.fake_engine import STALL
from tests.engine.processes import LIMIT, Watch, finish, joined, launch, request
from tests.fakes import generate_alone
from tests.frontend.fake_client import text_model


def expected(name: str, max_tokens: int = 8, max_model_len: int = 64) -> list[int]:
    return generate_alone(request(name, max_tokens=max_tokens), max_model_len)[0]


async def finish_async(client: ZmqClient) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while client.has_unfinished():
        outputs += (await asyncio.wait_for(client.get_outputs_async(), LIMIT)).outputs
    return outputs


def test_sync_face_and_start_phases() -> None:
    phases: list[StartupPhase] = []
    begin = time.monotonic()
    client = launch(on_phase=phases.append)
    info = client.wait_ready()
    wall = time.monotonic() - begin
    assert info == client.info
    assert info.max_model_len == 64
    between = [phase for phase in phases if phase.progress not in (None, 0.0, 1.0)]
    assert [(phase.name, phase.progress) for phase in phases if phase not in between] == [
        ("import", None),
        ("weights", 0.0),
        ("weights", 1.0),
        ("KV", None),
    ]
    # One in between comes too soon after the first, unless the machine was very busy.
    assert all(phase.at > phases[1].at + 0.19 for phase in between)
    assert [phase.name for phase in client.start_phases] == ["launch", "import", "weights", "KV"]
    # When this process hears that the other is ready is up to the machine.
    assert wall / 2 < sum(phase.seconds for phase in client.start_phases) < wall + 0.02
    assert client.get_outputs().outputs == []
    outputs = finish(client, [request("a"), request("b")])
    for name in ("a", "b"):
        assert joined(outputs, name) == expected(name)
    assert client.stats.num_free_blocks == client.stats.num_blocks
    assert client.call("reset_prefix_cache") is None
    client.shutdown()
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.add_request(request("c"))


async def test_async_face_and_abort_within_a_step() -> None:
    client = launch("long,slow")
    await client.wait_ready_async()
    names = [str(i) for i in range(40)]
    for name in names:
        client.add_request(request(name))
    client.add_request(request("endless", max_tokens=4000))
    outputs = (await client.get_outputs_async()).outputs
    client.abort(["endless", "unknown"])
    outputs += await finish_async(client)
    for name in names:
        assert joined(outputs, name) == expected(name, max_model_len=4096)
    endless = [output for output in outputs if output.request_id == "endless"]
    assert endless[-1].finish_reason == "abort"
    assert len(endless) < 1000  # a step takes 2 ms; either process may have to wait for a busy machine
    assert client.stats.num_running == 0
    assert client.stats.num_free_blocks == client.stats.num_blocks
    with pytest.raises(EngineError, match="asynchronously"):
        client.get_outputs()
    await client.stop_async()
    client.shutdown()


async def test_an_engine_belongs_to_one_event_loop() -> None:
    client = launch()
    await client.wait_ready_async()
    other = asyncio.new_event_loop()
    with pytest.raises(EngineError, match="another event loop"):
        await asyncio.to_thread(other.run_until_complete, client.get_outputs_async())
    other.close()
    client.shutdown()


def test_the_offline_api_takes_it_as_it_is() -> None:
    client = launch("long")
    client.wait_ready()
    with LLM.from_client(client, text_model()) as llm:
        prompts = [{"prompt_token_ids": [7, i]} for i in range(20)]
        results = llm.generate(prompts, SamplingParams(max_tokens=20), use_tqdm=False)
        for i, result in enumerate(results):
            assert result.outputs[0].token_ids == generate_alone(request("x", [7, i], 20), 4096)[0]
        stream = llm.stream({"prompt_token_ids": [1]}, SamplingParams(max_tokens=4000))
        next(stream)
        stream.close()
        assert not client.has_unfinished()


async def test_a_killed_process_is_noticed_at_once_by_all_who_wait() -> None:
    client = launch("long,slow")
    await client.wait_ready_async()
    death = asyncio.create_task(client.wait_dead())
    client.add_request(request("a", max_tokens=4000))
    await client.get_outputs_async()
    begin = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        await finish_async(client)
    assert time.monotonic() - begin < 5.0
    assert "SIGKILL" in str(await asyncio.wait_for(death, LIMIT))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.add_request(request("b"))
    client.abort(["a"])
    client.dump_stacks()
    client.shutdown()


@pytest.mark.parametrize("words", ["long", "hang-at-start"])
async def test_a_process_that_is_stopped_is_ended_whether_it_serves_or_starts(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TICK", 0.3), ("STILL_AFTER", 2), ("STILL_AFTER_STARTING", 2)):
        monkeypatch.setattr(zmq_client, name, value)
    client = launch(words)
    ready = asyncio.create_task(client.wait_ready_async())
    if words == "long":
        await ready
        client.add_request(request("a", max_tokens=4000))
    assert await asyncio.to_thread(select.select, [client._child._beats], [], [], LIMIT)  # it has begun
    watch = Watch(client.pid)
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"process {client.pid} stands still: it gave no heartbeat for 0.6 s"):
        await asyncio.wait_for(finish_async(client) if words == "long" else ready, LIMIT)
    watch.wait()
    client.shutdown()


def test_the_sync_face_sees_a_stopped_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_client, "TICK", 0.3)
    monkeypatch.setattr(zmq_client, "STILL_AFTER", 2)
    client = launch("long,slow")
    client.wait_ready()
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="stands still"):
        finish(client, [request("a", max_tokens=4000)])
    client.shutdown()


async def test_a_step_that_takes_long_is_no_hang() -> None:
    """Heartbeats come while the engine's thread is in a step, and while it loads."""
    lines: list[str] = []
    serving, loading = launch(take_line=lines.append), launch("hang-at-start")
    await serving.wait_ready_async()
    serving.add_request(request("a", [STALL]))
    while "stalling\n" not in lines:
        await asyncio.sleep(0.01)
    for client in (serving, loading):
        for _ in range(4):
            assert select.select([client._child._beats], [], [], LIMIT)[0]
            assert not client._child.stands_still(1)
        client.shutdown()


async def test_an_idle_engine_is_also_seen_dying() -> None:
    client = launch()
    await client.wait_ready_async()
    os.kill(client.pid, signal.SIGKILL)
    assert "SIGKILL" in str(await asyncio.wait_for(client.wait_dead(), LIMIT))
    client.shutdown()


async def test_silence_is_not_death_but_is_measured() -> None:
    lines: list[str] = []
    client = launch(take_line=lines.append)
    await client.wait_ready_async()
    assert client.seconds_without_step() == 0.0
    client.add_request(request("a", [STALL]))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.get_outputs_async(), 0.1)
    assert not client.is_dead
    assert 0.1 < client.seconds_without_step() < LIMIT
    client.shutdown()


async def test_a_busy_event_loop_is_not_taken_for_a_stalled_engine() -> None:
    client = launch("long,slow")
    await client.wait_ready_async()
    client.add_request(request("a", max_tokens=4000))
    await client.get_outputs_async()
    time.sleep(0.3)  # what a busy loop does
    assert client._receiver.socket.poll(LIMIT * 1000)
    assert client.seconds_without_step() < 0.3
    client.shutdown()


def test_it_works_on_uvloop() -> None:
    async def main() -> list[EngineOutput]:
        client = launch()
        await client.wait_ready_async()
        for i in range(20):
            client.add_request(request(str(i)))
        outputs = await finish_async(client)
        client.shutdown()
        return outputs

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outputs = runner.run(main())
    for i in range(20):
        assert joined(outputs, str(i)) == expected(str(i))


async def test_shutdown_wakes_a_waiting_reader() -> None:
    client = launch()
    await client.wait_ready_async()
    reader = asyncio.create_task(client.get_outputs_async())
    await asyncio.sleep(0)
    await client.stop_async()
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(reader, LIMIT)
    client.shutdown()


async def test_two_engines_at_once_do_not_know_each_other() -> None:
    one, two = launch("long,slow"), launch("long,slow")
    await asyncio.gather(one.wait_ready_async(), two.wait_ready_async())
    one.add_request(request("a", max_tokens=4000))
    two.add_request(request("a", max_tokens=50))
    watch = Watch(one.pid)
    one.shutdown()
    watch.wait()
    assert joined(await finish_async(two), "a") == expected("a", 50, 4096)
    two.shutdown()


def processor_seconds(pid: int) -> float:
    """What a process has used so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_an_idle_engine_uses_no_processor_in_either_process() -> None:
    client = launch()
    await client.wait_ready_async()
    client.add_request(request("a"))
    await finish_async(client)
    for _ in range(5):  # on a busy machine the last of the work may fall into the first second
        before = processor_seconds(client.pid), time.process_time()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.get_outputs_async(), 1.0)
        used = processor_seconds(client.pid) - before[0], time.process_time() - before[1]
        if used[0] <= 0.01 and used[1] < 0.02:  # the clock's tick, and setting the timer
            break
    else:
        pytest.fail(f"the engine used {used[0]:.3f} s of an idle second, the client {used[1]:.3f}")
    client.shutdown()


SERVE = """
import asyncio, json, sys
import msgspec
from quire.config.engine import EngineConfig
from quire.engine.zmq_client import ZmqClient
from quire.frontend.async_engine import AsyncEngine
from quire.types.request import EngineRequest

async def main():
    client = ZmqClient(EngineConfig.from_flat(model=sys.argv[1], num_threads=1))
    await client.wait_ready_async()
    for one in msgspec.json.decode(sys.argv[2], type=list[EngineRequest]):
        client.add_request(one)
    outputs = []
    while client.has_unfinished():
        outputs += (await client.get_outputs_async()).outputs
    client.shutdown()
    phases = [phase.name for phase in client.start_phases]
    return {"outputs": msgspec.to_builtins(outputs), "phases": phases, "torch": "torch" in sys.modules}

print(json.dumps(asyncio.run(main())))
"""


def answers(outputs: list[EngineOutput]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for output in outputs:
        tokens, logprobs, reasons = result.setdefault(output.request_id, ([], [], []))
        tokens += output.token_ids
        logprobs += output.logprobs or []
        reasons += [output.finish_reason] * (output.finish_reason is not None)
    return result


def test_a_real_engine_answers_as_it_does_in_process_and_its_client_imports_no_torch(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    requests = [
        request(str(i), [(7 * i + j) % VOCAB for j in range(5 + i)], 12, logprobs=2, temperature=i % 3 * 0.7)
        for i in range(9)
    ]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(model), msgspec.json.encode(requests).decode()],
        capture_output=True,
        text=True,
        check=True,
    )
    there = json.loads(done.stdout)
    assert there["torch"] is False
    assert there["phases"] == ["launch", "import", "plan", "weights", "self-check", "KV"]
    client = make_inproc_client(EngineConfig.from_flat(model=str(model), num_threads=1))
    here = finish(client, requests)
    client.shutdown()
    assert answers(msgspec.convert(there["outputs"], list[EngineOutput])) == answers(here)
