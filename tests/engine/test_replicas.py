"""Replicas: requests go where their prefix is, and outlive the replica that they were in."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from quire.config.engine import EngineConfig
from quire.engine import replicas as replicas_module
from quire.engine import warming, zmq_client
from quire.engine.replicas import ReplicaClient
from quire.engine.router import Router, Ticket
from quire.engine.warming import Told
from quire.engine.zmq_client import ZmqClient
from quire.types.console import ConsoleQuery, EngineView
from quire.types.control import LiveLimits
from quire.types.errors import EngineDeadError, EngineError, EngineStartError
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.engine.fake_engine import COMMAND, EXIT
from tests.engine.processes import Watch, pids
from tests.fakes import generate_alone

LIMIT = 20.0


def ask(name: str, token_ids: list[int], max_tokens: int = 30) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, token_ids=token_ids, params=params, seed=0, max_tokens=max_tokens)


class Answers:
    """All that has been handed out."""

    def __init__(self, client: ReplicaClient) -> None:
        self._client = client
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str | None] = {}

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                for output in (await self._client.get_outputs_async()).outputs:
                    self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                    if output.finish_reason is not None:
                        assert output.request_id not in self.ends
                        self.ends[output.request_id] = output.error


@asynccontextmanager
async def replicas(count: int = 2, model: str = "long,slow") -> AsyncIterator[ReplicaClient]:
    config = EngineConfig.from_flat(model=model)
    client = ReplicaClient(count, lambda index, count: ZmqClient(config, command=COMMAND))
    try:
        await client.wait_ready_async()
        yield client
    finally:
        await client.stop_async()
        client.shutdown()


def holder(client: ReplicaClient, name: str) -> int:
    return client._open[name].replica


def test_requests_go_to_the_replica_with_their_prefix_or_the_least_load() -> None:
    async def run() -> None:
        async with replicas() as client:
            answers, talk = Answers(client), list(range(1, 129))
            client.add_request(ask("a", talk))
            client.add_request(ask("other", [3] * 100))
            first = holder(client, "a")
            assert holder(client, "other") == 1 - first
            await answers.read_until(lambda: len(answers.ends) == 2)
            client.add_request(ask("b", [*talk, 7, 8, 9]))
            assert holder(client, "b") == first
            await answers.read_until(lambda: len(answers.ends) == 3)
            assert answers.ends == {"a": None, "other": None, "b": None}

    asyncio.run(run())


def test_the_next_turn_goes_where_the_answer_was_generated_until_caches_are_reset() -> None:
    async def run() -> None:
        async with replicas() as client:
            answers, talk = Answers(client), list(range(1, 17))
            client.add_request(ask("a", talk, 100))
            await answers.read_until(lambda: "a" in answers.ends)
            turn = [*talk, *answers.tokens["a"], 7, 8]
            names = client._names(ask("b", turn))
            assert client._router._hits(names)[0] == 7  # blocks of 16 tokens, of 116
            await client.call_async("reset_prefix_cache")
            await until(lambda: client._router._hits(names) == [0, 0])

    asyncio.run(run())


def test_the_console_sees_the_requests_and_blocks_of_all_replicas() -> None:
    async def scenario() -> None:
        async with replicas() as client:
            answers = Answers(client)
            for name in ("a", "b"):
                client.add_request(ask(name, [ord(name)] * 4))
            await answers.read_until(lambda: {"a", "b"} <= answers.tokens.keys())
            view: EngineView = await client.call_async("console", ConsoleQuery())
            assert {holder(client, name) for name in ("a", "b")} == {0, 1}
            assert sorted(request.id for request in view.requests) == ["a", "b"]
            assert sorted(request.row for request in view.requests) == [-1, 0]
            assert len(view.pools) == 2

    asyncio.run(scenario())


def test_requests_go_on_when_their_replica_dies() -> None:
    """With the tokens that they would have had, none of them twice; and the replica comes back."""

    async def run() -> None:
        async with replicas() as client:
            answers, calm = Answers(client), Answers(client)
            prompts = {f"r{index}": [5 + index] * 40 for index in range(6)}
            for name, prompt in prompts.items():
                client.add_request(ask(name, prompt, 400))
            await calm.read_until(lambda: len(calm.ends) == 6)
            for name, prompt in prompts.items():
                client.add_request(ask(name, prompt, 400))
            await answers.read_until(lambda: len(answers.tokens) == 6)
            victim = pids(client)[0]
            os.kill(victim, signal.SIGKILL)
            await answers.read_until(lambda: len(answers.ends) == 6)
            assert answers.ends == dict.fromkeys(prompts)
            assert answers.tokens == calm.tokens
            async with asyncio.timeout(LIMIT):
                while len(pids(client)) < 2:
                    await asyncio.sleep(0.02)
            assert victim not in pids(client)
            assert client.stats.prompt_tokens >= 6 * 40 + 6 * 8  # those of the dead replica count on

    asyncio.run(run())


def test_a_replica_that_is_stopped_is_replaced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_client, "TICK", 0.3)
    monkeypatch.setattr(zmq_client, "STILL_AFTER", 2)

    async def run() -> None:
        async with replicas() as client:
            answers = Answers(client)
            prompts = {f"r{index}": [5 + index] * 40 for index in range(4)}
            for name, prompt in prompts.items():
                client.add_request(ask(name, prompt, 600))
            await answers.read_until(lambda: len(answers.tokens) == 4)
            victim, other = pids(client)
            os.kill(victim, signal.SIGSTOP)
            await answers.read_until(lambda: len(answers.ends) == 4)
            assert answers.ends == dict.fromkeys(prompts)
            assert answers.tokens == {
                name: generate_alone(ask("x", prompt, 600), 4096)[0] for name, prompt in prompts.items()
            }
            await until(lambda: len(pids(client)) == 2)
            assert other in pids(client)
            assert victim not in pids(client)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_replica_that_dies_before_it_answers_a_verb_is_not_waited_for() -> None:
    """The others did it, and the one that comes back is told; whoever asked would wait for another engine."""

    async def run() -> None:
        async with replicas() as client:
            victim = pids(client)[0]
            os.kill(victim, signal.SIGSTOP)  # it cannot answer
            asked = asyncio.create_task(client.call_async("pause", True, limit=None))
            await until(lambda: any(verb == "pause" for verb, _ in client._told))
            os.kill(victim, signal.SIGKILL)
            await asyncio.wait_for(asked, LIMIT)
            await until(lambda: len(pids(client)) == 2 and victim not in pids(client))
            states = [await part.call_async("state") for part in client.parts]
            assert [state.is_paused for state in states] == [True, True]

    asyncio.run(run())


def test_the_number_of_replicas_changes_under_load_and_no_token_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up: no request goes to a replica before it is warm. Down: what does not end in time goes on in the others."""
    cold: list[ZmqClient] = []

    async def run() -> None:
        may_warm = asyncio.Event()

        async def warm_up(client: ZmqClient, told: Told, other: ZmqClient | None) -> None:
            cold.append(client)
            await may_warm.wait()
            await warming.warm_up(client, told, other)

        monkeypatch.setattr(replicas_module, "warm_up", warm_up)
        async with replicas(1) as client:
            answers = Answers(client)
            await client.call_async("set_limits", LiveLimits(max_num_seqs=8))
            growing = asyncio.create_task(client.resize(3, LIMIT))
            await until(lambda: bool(cold))
            prompts = {f"r{index}": [30 + index] * 40 for index in range(4)}
            for name, prompt in prompts.items():
                client.add_request(ask(name, prompt, 600))
                assert holder(client, name) == 0
            with pytest.raises(EngineError, match="being changed already"):
                await client.resize(2, 0.0)
            may_warm.set()
            await growing
            living = [each for each in client._clients if each is not None]
            assert living[1:] == cold
            assert [(await each.call_async("state")).max_num_seqs for each in living] == [8, 8, 8]
            assert all(each.stats.prompt_tokens == 1 for each in cold)  # of its first step
            for index in range(2):
                prompts[f"new{index}"] = [36 + index] * 40
                client.add_request(ask(f"new{index}", prompts[f"new{index}"], 600))
            assert {holder(client, f"new{index}") for index in range(2)} == {1, 2}
            await answers.read_until(lambda: len(answers.tokens) == 6)
            going = [Watch(each.pid) for each in cold]
            await client.resize(1, 0.1)
            for watch in going:
                watch.wait()
            assert {holder(client, name) for name in prompts} == {0}
            await answers.read_until(lambda: len(answers.ends) == 6)
            assert answers.ends == dict.fromkeys(prompts)
            assert answers.tokens == {
                name: generate_alone(ask("x", prompt, 600), 4096)[0] for name, prompt in prompts.items()
            }
            assert client.stats.prompt_tokens >= 6 * 40 + 2  # those of replicas that have left count on

    asyncio.run(run())


def test_a_replica_that_goes_finishes_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with replicas(2) as client:
            answers = Answers(client)
            for index in range(2):
                client.add_request(ask(f"r{index}", [30 + index] * 40, 200))
            assert [holder(client, f"r{index}") for index in range(2)] == [0, 1]
            shrinking = asyncio.create_task(client.resize(1, LIMIT))
            await until(lambda: client._num_wanted == 1)
            client.add_request(ask("late", [31] * 40, 5))
            assert holder(client, "late") == 0  # although the other one has its prefix
            await answers.read_until(lambda: len(answers.ends) == 3)
            await shrinking
            assert answers.ends == {"r0": None, "r1": None, "late": None}
            assert len(pids(client)) == 1

    with caplog.at_level("INFO", logger="quire"):
        asyncio.run(run())
    assert "replica 1 has left; 0 requests go on in others" in caplog.text


def test_a_replica_is_drained_by_its_number_and_comes_back() -> None:
    """What it has not finished in time goes on elsewhere; the others keep their processes."""

    async def run() -> None:
        async with replicas(2) as client:
            answers, (first, other) = Answers(client), pids(client)
            prompts = {f"r{index}": [30 + index] * 40 for index in range(4)}
            for name, prompt in prompts.items():
                client.add_request(ask(name, prompt, 600))
            await answers.read_until(lambda: len(answers.tokens) == 4)
            with pytest.raises(EngineError, match="replica 1 is not drained"):
                await client.restore(1)
            await client.drain(0, 0.1)
            assert pids(client) == [other]
            assert {holder(client, name) for name in prompts} == {1}
            for wrong, why in ((0, "it does not run"), (1, "no other one takes"), (2, "it does not run")):
                with pytest.raises(EngineError, match=f"replica {wrong} cannot be drained: {why}"):
                    await client.drain(wrong, 0.1)
            await answers.read_until(lambda: len(answers.ends) == 4)
            assert answers.tokens == {
                name: generate_alone(ask("x", prompt, 600), 4096)[0] for name, prompt in prompts.items()
            }
            await client.restore(0)
            assert pids(client)[1] == other
            assert pids(client)[0] != first
            client.add_request(ask("new", [9] * 40))
            assert holder(client, "new") == 0
            await answers.read_until(lambda: "new" in answers.ends)
            await client.drain(0, LIMIT)
            with pytest.raises(EngineError, match="none of the first 1 replicas runs"):
                await client.resize(1, LIMIT)

    asyncio.run(run())


def test_a_replica_that_cannot_come_or_dies_as_it_goes_costs_nothing() -> None:
    """One that does not start leaves the others as they are; one that is to go is not launched again."""

    async def run() -> None:
        right, wrong = (EngineConfig.from_flat(model=model) for model in ("long,slow", "fail-at-start"))
        client = ReplicaClient(2, lambda index, _: ZmqClient(right if index < 2 else wrong, command=COMMAND))
        try:
            await client.wait_ready_async()
            with pytest.raises(EngineError, match="replica 2 does not come up, and 2 go on: no model"):
                await client.resize(4, LIMIT)
            answers = Answers(client)
            for index in range(2):
                client.add_request(ask(f"r{index}", [30 + index] * 40, 300))
            await answers.read_until(lambda: len(answers.tokens) == 2)
            victim = pids(client)[1]
            shrinking = asyncio.create_task(client.resize(1, LIMIT))
            await until(lambda: client._num_wanted == 1)
            os.kill(victim, signal.SIGKILL)
            await answers.read_until(lambda: len(answers.ends) == 2)
            await shrinking
            assert answers.ends == {"r0": None, "r1": None}
            assert (len(pids(client)), len(client._clients)) == (1, 1)
        finally:
            await client.stop_async()
            client.shutdown()

    asyncio.run(run())


def test_only_the_request_that_kills_replicas_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bystanders share every replica that it kills, and go on once it is found: halves are tried in one replica."""

    def first_open(router: Router, names: Sequence[int], num_tokens: int, session: int = 0) -> Ticket:
        return Ticket(router._closed.index(False))

    monkeypatch.setattr(Router, "choose", first_open)
    monkeypatch.setattr(replicas_module, "_BACKOFF", 0.01)
    bystanders = {f"calm{index}": [9 + index] * 40 for index in range(3)}

    async def run() -> None:
        async with replicas(3) as client:
            answers = Answers(client)
            client.add_request(ask("deadly", [EXIT]))
            for name, prompt in bystanders.items():
                client.add_request(ask(name, prompt))
            await until(lambda: bool(client._trials.running))
            client.add_request(ask("late", [8] * 40))  # served by the others meanwhile
            await answers.read_until(lambda: "late" in answers.ends)
            assert "deadly" not in answers.ends
            await answers.read_until(lambda: len(answers.ends) == 5 or client._dead.done())
            error = answers.ends.pop("deadly")
            assert "died twice while it ran this request and no other, before its first token" in (error or "")
            assert answers.ends == dict.fromkeys([*bystanders, "late"])
            assert answers.tokens["calm2"] == generate_alone(ask("x", bystanders["calm2"]), 4096)[0]
            await until(lambda: len(pids(client)) == 3)
            assert client._trial_replica < 0
            assert not any(client._router._closed)

    asyncio.run(run())
    # Two with all of them, one with half of them, and two alone.
    assert caplog.text.count(" died: ") == 5


@pytest.mark.nightly
def test_suspects_are_tried_in_a_replica_that_is_there_when_none_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        right, wrong = (EngineConfig.from_flat(model=model) for model in ("long,slow", "fail-at-start"))
        launched = [0] * 3

        def launch(index: int, _: int) -> ZmqClient:
            launched[index] += 1
            return ZmqClient(right if launched[index] == 1 else wrong, command=COMMAND)

        monkeypatch.setattr(replicas_module, "_BACKOFF", 0.01)
        client = ReplicaClient(3, launch)
        try:
            await client.wait_ready_async()
            answers = Answers(client)
            client.add_request(ask("deadly", [EXIT]))
            client._open["deadly"].entry.num_deaths = 1  # as if it had died with others before
            client.add_request(ask("calm", [9] * 40))
            await answers.read_until(lambda: len(answers.ends) == 2)
            assert "died twice" in (answers.ends["deadly"] or "")
            assert answers.ends["calm"] is None
        finally:
            await client.stop_async()
            client.shutdown()

    asyncio.run(run())


def test_a_wrong_model_is_told_and_the_last_death_ends_all() -> None:
    async def run() -> None:
        with pytest.raises(EngineStartError, match="no model"):
            async with replicas(2, "fail-at-start"):
                pass
        async with replicas(2) as client:
            client.add_request(ask("a", [5] * 20, 3000))
            for pid in pids(client):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="the last replica died"):
                await Answers(client).read_until(lambda: False)
            assert "the last replica died" in str(await client.wait_dead())

    asyncio.run(run())
