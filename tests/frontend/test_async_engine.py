from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.async_engine import AsyncEngine
from quire.types.errors import EngineDeadError, EngineError, GenerationError, RequestError
from quire.types.outputs import EngineOutputs, EngineStats, RequestOutput
from quire.types.sampling import OutputKind, SamplingParams
from tests.frontend.fake_client import TOKENIZER, FakeClient, text_model

DELTA = SamplingParams(output_kind="delta", max_tokens=400)
X = "x" * 300


def make(*args: Any, **kwargs: Any) -> tuple[AsyncEngine, FakeClient]:
    client = FakeClient(*args, **kwargs)
    return AsyncEngine(client, text_model()), client


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def joined(outputs: list[RequestOutput]) -> str:
    return "".join(c.text for output in outputs for c in output.outputs)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not come true")


def assert_idle(engine: AsyncEngine) -> None:
    assert not engine._mailboxes
    assert len(engine._outputs) == 0


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
async def test_a_stream_says_everything_once_in_the_way_asked_for(kind: OutputKind) -> None:
    engine, _ = make()
    outputs = await collect(engine.generate("Hello", SamplingParams(output_kind=kind)))
    text = joined(outputs) if kind == "delta" else outputs[-1].outputs[0].text
    assert text == "Hello"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (len(outputs) == 1) == (kind == "final_only")
    assert_idle(engine)


async def test_loads_of_experts_are_added_up() -> None:
    class Counting(FakeClient):
        def get_outputs(self) -> EngineOutputs:
            return EngineOutputs(super().get_outputs().outputs, EngineStats(expert_load={3: [1, 0, 2]}))

    client = Counting()
    engine = AsyncEngine(client, text_model())
    await collect(engine.generate("Hello"))
    assert engine.expert_load == {3: [client.num_steps, 0, 2 * client.num_steps]}


async def test_many_streams_at_once() -> None:
    engine, client = make()
    prompts = [f"prompt number {i}" for i in range(300)]  # more than one slice of outputs
    results = await asyncio.gather(*(collect(engine.generate(p, DELTA)) for p in prompts))
    assert [joined(r) for r in results] == prompts
    assert client.num_steps < 60  # they ran together
    assert_idle(engine)


async def test_streams_of_one_step_are_served_in_turn() -> None:
    engine, _ = make(X)
    heard: list[str] = []

    async def read(name: str) -> None:
        async for _ in engine.generate("p", DELTA, name):
            heard.append(name)

    names = [str(i) for i in range(8)]
    await asyncio.gather(*(read(name) for name in names))
    rounds = [heard[i : i + 8] for i in range(0, len(heard) - 8, 8)]
    assert all(sorted(r) == names for r in rounds[2:-2])


async def test_chat() -> None:
    engine, _ = make()
    outputs = await collect(engine.chat([{"role": "user", "content": "Hi"}], DELTA))
    assert joined(outputs) == "[user]Hi\n[assistant]"


async def test_n_completions_come_in_one_stream() -> None:
    engine, client = make(lambda request: list(request.request_id.encode()))
    params = SamplingParams(n=3, output_kind="delta")
    outputs = await collect(engine.generate("p", params, "r"))
    by_index = ["".join(c.text for o in outputs for c in o.outputs if c.index == i) for i in range(3)]
    assert by_index == ["0_r", "1_r", "2_r"]
    assert len(client.added) == 3


async def test_an_announcement_comes_before_any_token() -> None:
    engine, client = make()
    stream = engine.generate("Hello", DELTA, announce=True)
    announcement = await anext(stream)
    assert len(client.added) == 1
    assert client.num_steps == 0
    assert (announcement.outputs, announcement.finished) == ([], False)
    assert announcement.prompt_token_ids == client.added[0].token_ids
    assert joined(await collect(stream)) == "Hello"
    left = engine.generate("Hello", DELTA, announce=True)
    await anext(left)
    await left.aclose()
    assert client.aborted == [client.added[1].request_id]


async def test_a_bad_request_raises_to_its_caller_and_reaches_no_engine() -> None:
    engine, client = make()
    with pytest.raises(RequestError, match="empty"):
        await collect(engine.generate(""))
    assert client.added == []
    with pytest.raises(RequestError, match="role"):
        await collect(engine.chat([{"content": "Hi"}]))


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    engine, _ = make()
    first = engine.generate("Hello", DELTA, "same")
    head = await anext(first)
    with pytest.raises(RequestError, match="in use"):
        await collect(engine.generate("Other", DELTA, "same"))
    assert joined([head, *await collect(first)]) == "Hello"


async def test_a_failure_ends_only_its_own_stream() -> None:
    engine, _ = make(errors={"bad": "boom"})
    bad, good = await asyncio.gather(
        collect(engine.generate("a", DELTA, "bad")),
        collect(engine.generate("b", DELTA, "good")),
        return_exceptions=True,
    )
    assert isinstance(bad, GenerationError)
    assert "boom" in str(bad)
    assert isinstance(good, list)
    assert joined(good) == "b"
    assert_idle(engine)


async def test_a_slow_reader_gets_merged_deltas_and_delays_nobody() -> None:
    engine, client = make(X, chunk=3)
    slow = engine.generate("p", SamplingParams(output_kind="delta", max_tokens=250, logprobs=1))
    outputs = [await anext(slow)]
    fast = await collect(engine.generate("q", DELTA))
    assert joined(fast) == X
    await until(lambda: not client.has_unfinished())
    mailbox = next(iter(engine._mailboxes.values()))
    assert len(mailbox._pending) <= 33  # bounded, though some 80 deltas came
    outputs += await collect(slow)
    assert len(outputs) == 2
    last = outputs[-1].outputs[0]
    assert joined(outputs) == "x" * 250
    assert last.finish_reason == "length"
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 250
    assert sum(len(o.outputs[0].logprobs or ()) for o in outputs) == 250
    assert last.cumulative_logprob == -500.0


async def test_a_slow_reader_of_cumulative_outputs_gets_the_newest() -> None:
    engine, client = make(X)
    slow = engine.generate("p", SamplingParams(max_tokens=100))
    await anext(slow)
    await until(lambda: not client.has_unfinished())
    (last,) = await collect(slow)
    assert last.outputs[0].text == "x" * 100


async def test_closing_the_iterator_aborts_the_request() -> None:
    engine, client = make(X)
    async with aclosing(engine.generate("p", DELTA, "r")) as stream:
        await anext(stream)
        steps = client.num_steps
    assert client.aborted == ["r"]
    assert client.num_steps <= steps + 1
    assert_idle(engine)


async def test_cancelling_the_reader_aborts_the_request() -> None:
    engine, client = make(X)
    params = SamplingParams(n=2, output_kind="delta", max_tokens=400)
    reader = asyncio.create_task(collect(engine.generate("p", params, "r")))
    await until(lambda: client.num_steps > 3)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert sorted(client.aborted) == ["0_r", "1_r"]
    assert_idle(engine)


async def test_a_stream_that_is_never_read_reaches_no_engine() -> None:
    engine, client = make()
    stream = engine.generate("p")
    await stream.aclose()
    assert client.added == []


async def test_abort_ends_the_stream_with_its_reason() -> None:
    engine, client = make(X)
    stream = engine.generate("p", DELTA, "r")
    outputs = [await anext(stream)]
    await engine.abort("r")
    await engine.abort("unknown")
    outputs += await collect(stream)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert client.aborted == ["r"]
    await until(lambda: not client.has_unfinished())
    assert joined(await collect(engine.generate("p", DELTA, "r"))) == X  # the id is free again


async def test_a_stop_string_aborts_in_the_engine_but_not_twice() -> None:
    engine, client = make("one. two. three.")
    params = SamplingParams(output_kind="delta", max_tokens=100, stop=". t")
    assert joined(await collect(engine.generate("p", params, "r"))) == "one"
    assert client.aborted == ["r"]


async def test_engine_death_ends_every_stream() -> None:
    engine, _ = make(X, dies_at_step=5)
    results = await asyncio.gather(*(collect(engine.generate("p", DELTA)) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(r, EngineDeadError) and "told to" in str(r) for r in results)
    assert engine.is_dead
    with pytest.raises(EngineDeadError, match="told to"):
        await collect(engine.generate("p"))
    assert_idle(engine)


async def test_what_was_generated_before_the_death_is_still_read() -> None:
    engine, _ = make(X, dies_at_step=5)
    stream = engine.generate("p", DELTA)
    outputs = [await anext(stream)]
    await until(lambda: engine.is_dead)
    outputs.append(await anext(stream))
    assert joined(outputs) == "x" * 5
    with pytest.raises(EngineDeadError):
        await anext(stream)


async def test_a_bug_in_the_client_hangs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenClient(FakeClient):
        async def get_outputs_async(self) -> EngineOutputs:
            raise ZeroDivisionError("a bug")

    engine = AsyncEngine(BrokenClient(), text_model())
    with pytest.raises(EngineDeadError, match="a bug") as failed:
        await collect(engine.generate("p"))
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert "reading the engine's outputs failed" in caplog.text


async def test_shutdown_ends_streams_and_may_be_repeated() -> None:
    client = FakeClient(X)
    async with AsyncEngine(client, text_model()) as engine:
        stream = engine.generate("p", DELTA)
        await anext(stream)
    engine.shutdown()
    assert client.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(stream)
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(engine.generate("p"))


def test_a_second_event_loop_is_refused_and_not_left_waiting() -> None:
    engine, _ = make()

    async def once() -> str:
        return joined(await collect(engine.generate("Hi", DELTA)))

    assert asyncio.run(once()) == "Hi"
    with pytest.raises(EngineError, match="AsyncEngine"):
        asyncio.run(once())


@pytest.mark.parametrize(
    ("prompt", "params", "is_off_the_loop"),
    [
        ("y" * 30_000, {}, True),
        ("yyyyyy", {"bad_words": [f"x{index}" for index in range(200)]}, True),
        ("yyyyyy", {}, False),
    ],
)
async def test_what_takes_long_to_tokenize_is_tokenized_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, prompt: str, params: dict[str, Any], is_off_the_loop: bool
) -> None:
    engine, client = make("ok")
    threads: set[threading.Thread] = set()
    encode = TOKENIZER.encode

    def spied(*arguments: Any, **options: Any) -> list[int]:
        threads.add(threading.current_thread())
        return encode(*arguments, **options)

    monkeypatch.setattr(TOKENIZER, "encode", spied)
    asked = SamplingParams(output_kind="delta", truncate_prompt_tokens=5, **params)
    assert joined(await collect(engine.generate(prompt, asked))) == "ok"
    assert client.added[0].token_ids == list(b"yyyyy")
    assert (threading.current_thread() not in threads) is is_off_the_loop


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_random_aborts_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)

    async def read(engine: AsyncEngine, prompt: str, how: str, after: int) -> str:
        heard: list[RequestOutput] = []
        async with aclosing(engine.generate(prompt, DELTA, f"id-{prompt}")) as stream:
            async for output in stream:
                heard.append(output)
                if len(heard) == after and how == "close":
                    break
                if len(heard) == after and how == "abort":
                    await engine.abort(f"id-{prompt}")
        return joined(heard)

    async def run() -> None:
        engine, client = make(chunk=chance.randint(1, 3))
        prompts = [f"{i}:" + "z" * chance.randint(0, 20) for i in range(12)]
        hows = [chance.choice(["read", "close", "abort", "cancel"]) for _ in prompts]
        tasks = [
            asyncio.create_task(read(engine, p, how, chance.randint(1, 10)))
            for p, how in zip(prompts, hows, strict=True)
        ]
        for task, how in zip(tasks, hows, strict=True):
            if how == "cancel":
                for _ in range(chance.randint(0, 5)):
                    await asyncio.sleep(0)
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for prompt, how, result in zip(prompts, hows, results, strict=True):
            if how == "read":
                assert result == prompt
            elif isinstance(result, str):
                assert prompt.startswith(result)
            else:
                assert isinstance(result, asyncio.CancelledError)
        await until(lambda: not client.has_unfinished())
        assert_idle(engine)
        await until(lambda: not engine._outputs._aborting)
        engine.shutdown()

    asyncio.run(run())


async def test_nothing_keeps_a_request_after_its_end() -> None:
    gc.disable()
    try:
        engine, client = make(X, errors={"bad": "boom"})
        refs: list[weakref.ref[Any]] = []
        open_request = engine._open

        def spy(request: Any, reading: Any) -> Any:
            mailbox = open_request(request, reading)
            refs.append(weakref.ref(mailbox))
            refs.append(weakref.ref(engine._outputs._requests[request.request_id]))
            return mailbox

        engine._open = spy  # type: ignore[method-assign]
        await collect(engine.generate("a", SamplingParams(n=2, logprobs=1, output_kind="delta")))
        async with aclosing(engine.generate("b", DELTA)) as stream:
            await anext(stream)
        del stream
        with pytest.raises(GenerationError):
            await collect(engine.generate("c", DELTA, "bad"))
        await until(lambda: not client.has_unfinished())
        await asyncio.sleep(0)
        assert len(refs) == 6
        assert [ref() for ref in refs] == [None] * 6
    finally:
        gc.enable()
