"""Streams over engines that die: the same text, tokens, log-probabilities and ends as with an engine that lives."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.async_engine import AsyncEngine
from quire.types.errors import GenerationError
from quire.types.outputs import RequestOutput
from quire.types.sampling import SamplingParams
from quire.types.structured import StructuredOutputsParams
from tests.frontend.fake_client import text_model
from tests.frontend.mortal import Keeper, MortalClient, never, seeded

ANSWER = seeded(["one", "two", "größer", "drei.", "🦉", "stop", "END", "a b"])
LIMIT = 30.0


def random_params(chance: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {
        "n": chance.choice([1, 1, 3]),
        "seed": chance.randrange(1000),
        "max_tokens": chance.choice([1, 7, 30, 200]),
        "output_kind": chance.choice(["delta", "cumulative", "final_only"]),
    }
    if chance.random() < 0.4:
        fields["logprobs"] = chance.choice([0, 2])
    if chance.random() < 0.3:
        fields["prompt_logprobs"] = 1
    if chance.random() < 0.4:
        fields |= {"stop": ["stop", "END t"], "include_stop_str_in_output": chance.random() < 0.5}
    if chance.random() < 0.3:
        fields["structured_outputs"] = StructuredOutputsParams(regex="[a-z]+")
    return SamplingParams(**fields)


class Heard:
    """All that a reader was told of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._is_delta = params.output_kind == "delta"
        self.completions: dict[int, list[Any]] = {}
        self.prompt_logprobs: list[Any] = []

    def add(self, output: RequestOutput) -> None:
        for c in output.outputs:
            new = [c.text, c.token_ids, c.logprobs or [], c.cumulative_logprob, c.finish_reason, c.stop_reason]
            old = self.completions.get(c.index)
            if self._is_delta and old is not None:
                new[:3] = [before + after for before, after in zip(old[:3], new[:3], strict=True)]
            self.completions[c.index] = new
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs if self._is_delta else []) + output.prompt_logprobs

    def facts(self) -> Any:
        return self.completions, self.prompt_logprobs


async def read(engine: AsyncEngine, prompt: str, params: SamplingParams) -> Any:
    heard = Heard(params)
    async for output in engine.generate(prompt, params):
        heard.add(output)
    return heard.facts()


async def answers(jobs: list[tuple[str, SamplingParams]], make: Any, chance: random.Random) -> tuple[Any, Keeper]:
    async with Keeper(make, chance) as keeper:
        engine = AsyncEngine(keeper.client, text_model())
        async with asyncio.timeout(LIMIT):
            results = await asyncio.gather(*(read(engine, *job) for job in jobs), return_exceptions=True)
        assert engine.num_requests == 0
        async with asyncio.timeout(LIMIT):
            while keeper.client.has_unfinished() or engine._outputs._aborting:
                await asyncio.sleep(0)
        engine.shutdown()
    return results, keeper


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_requests_that_come_and_go_between_deaths_leave_nothing_behind(seed: int) -> None:
    """Also while there is no engine, or one that is dead and not known to be."""
    chance = random.Random(seed)

    async def visit(engine: AsyncEngine, index: int) -> Any:
        for _ in range(chance.randint(0, 60)):
            await asyncio.sleep(0)
        params = SamplingParams(n=2, seed=index, max_tokens=20, output_kind="delta", logprobs=0)
        heard, leaves_after = Heard(params), chance.choice([0, 1, 5, 1000, 1000])
        async with aclosing(engine.generate(f"{index}", params)) as stream:
            async for output in stream:
                heard.add(output)
                leaves_after -= 1
                if leaves_after <= 0 and not output.finished:
                    return None
        return heard.facts()

    def kills(client: MortalClient) -> bool:
        return client.num_steps >= 2 and chance.random() < 0.1

    async def run(make: Any) -> list[Any]:
        async with Keeper(make, chance) as keeper:
            engine = AsyncEngine(keeper.client, text_model())
            async with asyncio.timeout(LIMIT):
                found = await asyncio.gather(*(visit(engine, index) for index in range(12)))
                assert engine.num_requests == len(engine._outputs) == 0
                while keeper.client.has_unfinished() or engine._outputs._aborting:
                    await asyncio.sleep(0)
            engine.shutdown()
        return found

    whole = asyncio.run(run(lambda: MortalClient(ANSWER)))
    killed = asyncio.run(run(lambda: MortalClient(ANSWER, kills=kills)))
    stayed = [pair for pair in zip(whole, killed, strict=True) if None not in pair]
    assert all(a == b for a, b in stayed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_kills_at_random_moments_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    jobs = [(f"{index} " * chance.randint(1, 20), random_params(chance)) for index in range(chance.randint(1, 10))]
    prefill, chunk = chance.choice([3, 8, 1000]), chance.choice([1, 1, 4])
    share = chance.choice([0.02, 0.1, 0.3])

    def kills(client: MortalClient) -> bool:
        """Somebody gets a token now and then: what never does is poison, and refused."""
        return chance.random() < share and client.num_steps > chance.choice([0, 4])

    def mortal() -> MortalClient:
        # Every prompt fits into the steps of the shortest life; sooner or later comes a longer one.
        return MortalClient(ANSWER, kills=kills if chance.random() < 0.8 else never, prefill=prefill, chunk=chunk)

    whole, _ = asyncio.run(answers(jobs, lambda: MortalClient(ANSWER, prefill=prefill, chunk=chunk), chance))
    killed, keeper = asyncio.run(answers(jobs, mortal, chance))
    refused = [isinstance(result, GenerationError) for result in killed]
    assert [a for a, is_refused in zip(killed, refused, strict=True) if not is_refused] == [
        b for b, is_refused in zip(whole, refused, strict=True) if not is_refused
    ]
    assert sum(refused) <= sum(loss.num_refused for loss in keeper.losses)


def dies_once_at(moment: int) -> tuple[Any, Counter[str]]:
    looks: Counter[str] = Counter()

    def kills(client: MortalClient) -> bool:
        looks["all"] += 1
        return looks["all"] == moment + 1

    return (lambda: MortalClient(ANSWER, kills=kills, prefill=4)), looks


def second_dies_at_once(make: Callable[[], MortalClient]) -> Callable[[], MortalClient]:
    """The second engine dies before it has done anything."""
    lives: list[MortalClient] = []

    def make_next() -> MortalClient:
        lives.append(make())
        if len(lives) == 2:
            lives[-1].kill()
        return lives[-1]

    return make_next


@pytest.mark.parametrize("twice", [False, True])
def test_one_death_at_each_moment_of_a_request(twice: bool) -> None:
    """Before the first token, in prefill chunks, between and after tokens, during a stop: every step, both sides."""
    params = SamplingParams(
        n=2, seed=5, max_tokens=12, output_kind="delta", logprobs=1, prompt_logprobs=1, stop=["stop"]
    )
    jobs = [("a prompt of chunks", params), ("other", SamplingParams(seed=2, max_tokens=5, output_kind="delta"))]
    whole, _ = asyncio.run(answers(jobs, lambda: MortalClient(ANSWER, prefill=4), random.Random(0)))
    moment = 0
    while True:
        make, looks = dies_once_at(moment)
        if twice:
            make = second_dies_at_once(make)
        results, keeper = asyncio.run(answers(jobs, make, random.Random(moment)))
        assert results == whole, moment
        if looks["all"] <= moment:
            break
        assert len(keeper.losses) >= 1 + twice
        moment += 1
    assert moment > 20


async def test_a_poison_request_is_refused_and_the_others_do_not_notice() -> None:
    def kills(client: MortalClient) -> bool:
        return any(bytes(request.token_ids).startswith(b"poison") for request in client.running)

    jobs = [(f"good {index}", SamplingParams(max_tokens=9, seed=1)) for index in range(9)]
    whole, _ = await answers(jobs, lambda: MortalClient(ANSWER), random.Random(0))
    jobs.insert(4, ("poison", SamplingParams(max_tokens=9)))
    results, keeper = await answers(jobs, lambda: MortalClient(ANSWER, kills=kills), random.Random(0))
    refusal = results.pop(4)
    assert isinstance(refusal, GenerationError)
    assert "died twice while it ran this request and no other, before its first token" in str(refusal)
    assert results == whole
    assert sum(loss.num_refused for loss in keeper.losses) == 1
    assert len(keeper.losses) <= 8


async def test_a_request_that_kills_at_its_fifth_token_gets_four_and_is_refused() -> None:
    def kills(client: MortalClient) -> bool:
        return any(
            bytes(request.token_ids).startswith(b"poison") and client.num_generated(request) >= 4
            for request in client.running
        )

    heard: list[int] = []

    async def hear(engine: AsyncEngine) -> None:
        async for output in engine.generate("poison", SamplingParams(output_kind="delta", max_tokens=50)):
            heard.extend(output.outputs[0].token_ids)

    async with Keeper(lambda: MortalClient(ANSWER, kills=kills)) as keeper:
        engine = AsyncEngine(keeper.client, text_model())
        with pytest.raises(GenerationError, match="after 4 tokens"):
            await hear(engine)
        engine.shutdown()
    assert len(heard) == 4
    assert [loss.has_progressed for loss in keeper.losses] == [True, False, False]


async def test_an_abort_while_there_is_no_engine_frees_the_id() -> None:
    engines = [MortalClient("x" * 50), MortalClient("yes")]
    keeper = Keeper(lambda: engines.pop(0))
    client, params = keeper.client, SamplingParams(output_kind="delta", max_tokens=50)
    first = keeper.engines[0]
    await client.attach(first)
    engine = AsyncEngine(client, text_model())
    stream = engine.generate("p", params, "name")
    await anext(stream)
    first.kill()
    client.lose("killed")
    await stream.aclose()
    again = engine.generate("q", params, "name")
    asked = asyncio.create_task(anext(again))
    async with asyncio.timeout(LIMIT):
        while not client.has_unfinished() or client._said:
            await asyncio.sleep(0)
    assert await client.attach(engines[0]) == 0
    assert (await asked).outputs[0].text == "y"
    assert [request.request_id for request in engines[0].added] == ["name"]
    await again.aclose()
    engine.shutdown()


async def test_a_call_that_the_engine_did_not_answer_is_made_to_the_next() -> None:
    async with Keeper(lambda: MortalClient("x")) as keeper:
        call = asyncio.create_task(keeper.client.call_async("reset_prefix_cache"))
        await asyncio.sleep(0)
        keeper.engines[0].kill()
        await asyncio.wait_for(call, LIMIT)
        assert [engine.num_resets for engine in keeper.engines] == [0, 1]
