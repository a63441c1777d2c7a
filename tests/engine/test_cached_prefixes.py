"""What the router believes that replicas have cached is what their block pools hold, and what is on its way."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.replicas import ReplicaClient
from quire.engine.zmq_client import ZmqClient
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.kv.stream import block_names
from quire.sched.scheduler import Scheduler
from quire.sched.state import Limits
from quire.types.messages import AbortRequests, Command, EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.engine.test_core import Device
from tests.fakes import VOCAB_SIZE, FakeExecutor

BLOCK, NUM_BLOCKS, MAX_LEN = 4, 14, 48
LAYERS = {
    "full": [LayerKV("full", None, 4)],
    "window": [LayerKV("sliding", 6, 4)],
    "full and window": [LayerKV("full", None, 4), LayerKV("sliding", 6, 4)],
    "states": [LayerKV("state", None, 0, bytes_per_row=64), LayerKV("full", None, 4)],
}


class Replica:
    """An engine in this process that runs when `pump` says so, behind the face of a ZmqClient."""

    pid = 0
    start_phases = ()

    def __init__(self, layers: list[LayerKV]) -> None:
        layout = plan_layout(layers, BLOCK)
        counts = [NUM_BLOCKS] * len(layout.pools)
        self.kv = KVCacheManager(layout, counts, True)
        limits = Limits(
            max_num_seqs=4, max_num_batched_tokens=16, long_prefill_token_threshold=8, max_model_len=MAX_LEN
        )
        self.core = EngineCore(
            Scheduler(limits, policy="fcfs", kv=self.kv), Device(FakeExecutor(layout, counts, 4)), 2
        )
        self.loop = EngineLoop(self.core, debug_checks=True)
        releases = any(group.rule(BLOCK).releases for group in layout.groups)
        self.info = EngineInfo(VOCAB_SIZE, MAX_LEN, BLOCK, NUM_BLOCKS, 4, releases_blocks=releases)
        self.stats = EngineStats()
        self.add_request = self.loop.submit

    def abort(self, names: list[str]) -> None:
        self.loop.submit(AbortRequests(names))

    async def wait_ready_async(self) -> EngineInfo:
        return self.info

    async def get_outputs_async(self) -> EngineOutputs:
        await asyncio.Event().wait()
        raise AssertionError

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = None) -> Any:
        reply = obey(self.core, Command(0, verb, argument))
        assert reply.error is None
        return reply.value

    def take_received(self) -> list[EngineOutput]:
        return []

    async def stop_async(self) -> None:
        pass

    def shutdown(self) -> None:
        self.loop.shutdown()

    def pump(self) -> EngineOutputs:
        """One turn of the engine, as it comes out of the wire."""
        sent = msgspec.msgpack.encode(self.loop.run_once())
        return msgspec.msgpack.decode(sent, type=EngineOutputs)

    def cached(self) -> set[int]:
        """Of the last group, which is the one whose blocks decide."""
        group = self.kv.layout.groups[-1]
        return set(block_names(list(self.kv.pools[group.pool].cached[group.index])))


async def connect(layers: list[LayerKV]) -> tuple[ReplicaClient, list[Replica]]:
    parts = [Replica(layers) for _ in range(2)]
    client = ReplicaClient(2, lambda index, count: cast(ZmqClient, parts[index]))
    await client.wait_ready_async()
    return client, parts


def ask(name: str, token_ids: list[int], max_tokens: int, salt: str | None = None) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(
        request_id=name, token_ids=token_ids, params=params, seed=0, max_tokens=max_tokens, cache_salt=salt
    )


def believed(client: ReplicaClient, index: int) -> set[int]:
    return {name for name, holders in client._router._holders.items() if holders >> index & 1}


def check(client: ReplicaClient, parts: list[Replica]) -> None:
    """Nothing that is cached is unknown, and what is believed beyond it was sent to a request that has no token."""
    for index, part in enumerate(parts):
        coming = {
            name
            for opened in client._open.values()
            if opened.replica == index and not opened.entry.has_progressed
            for name in client._names(opened.entry.resumed())
        }
        found = believed(client, index)
        assert part.cached() <= found <= part.cached() | coming


Action = st.one_of(
    st.tuples(
        st.just("ask"),
        st.integers(0, 2),  # which beginning
        st.integers(0, 30),  # tokens of it
        st.lists(st.integers(0, 5), max_size=8),  # its own tokens
        st.integers(1, 14),
        st.sampled_from([None, "a"]),
    ),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("abort"), st.integers(0, 40)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("weights")),
    st.tuples(st.just("lose"), st.integers(0, 1)),
)


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=25, deadline=None)
@given(actions=st.lists(Action, max_size=50))
def test_any_trace_leaves_the_router_with_what_the_pools_hold(kind: str, actions: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        client, parts = await connect(LAYERS[kind])

        def take(index: int) -> None:
            client._take(index, parts[index].pump())

        for number, (verb, *arguments) in enumerate(actions):
            if verb == "ask":
                which, length, own, max_tokens, salt = arguments
                tokens = [*[which + 10] * length, *own] or [1]
                client.add_request(ask(str(number), tokens[: MAX_LEN - max_tokens], max_tokens, salt))
            elif verb == "step":
                take(arguments[0])
            elif verb == "abort":
                client.abort([str(arguments[0])])
            elif verb == "lose":
                index = arguments[0]
                client._lose(index, cast(ZmqClient, parts[index]))
                client._submit_waiting()
                parts[index] = Replica(LAYERS[kind])
                parts[index].kv.weights = parts[1 - index].kv.weights  # as after warming up
                await parts[index].call_async("watch_cache")
                client._serve_with(index, cast(ZmqClient, parts[index]))
                take(index)
            else:
                await client.call_async("reset_prefix_cache")
                has_others = verb == "weights" and not client._open
                for index, part in enumerate(parts):
                    if has_others:
                        part.core.scheduler.stand_down()
                        part.core.scheduler.use_weights(f"digest {number}")
                    take(index)
            check(client, parts)
        while client.has_unfinished():
            for index in range(2):
                take(index)
            client.take_received()
        for index, part in enumerate(parts):
            take(index)
            assert believed(client, index) == part.cached()
        assert client._router.loads == [0, 0]
        await client.stop_async()

    asyncio.run(run())
