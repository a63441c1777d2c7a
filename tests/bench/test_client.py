"""The stream reader with exact times, and the client against every kind of failure over a real socket."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.client import EventStream, OpenAIClient, StreamError, clock
from quire.bench.data import Sample
from quire.bench.options import TargetOptions
from quire.bench.records import RequestRecord
from quire.types.errors import BenchmarkError, ConfigError
from tests.bench.fake_server import Behaviour, FakeServer

SAMPLE = Sample(text="one two three", prompt_len=3, output_len=4)


def event(chunk: Any) -> bytes:
    return b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n"


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}], "usage": None}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_times_are_those_of_the_tokens() -> None:
    stream = EventStream()
    for now, chunk in [(1.0, text("a")), (1.5, text("")), (1.75, text("b")), (9.0, text("", "stop"))]:
        stream.feed(event(chunk), now)
    stream.feed(event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}), 10.0)
    stream.feed(event(b"[DONE]"), 11.0)
    assert (stream.first, stream.last, stream.gaps) == (1.0, 1.75, [0.5, 0.25])
    assert stream.num_chunks == 3
    assert stream.finished
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (7, 3)


@pytest.mark.parametrize(
    ("chunk", "counts"),
    [
        (delta(role="assistant", content=""), False),
        (delta(role="assistant", content=None), False),
        (delta(role="assistant", content="a"), True),
        (delta(content=""), True),
        (delta(content="a"), True),
        (delta(reasoning_content="a"), True),
        (delta(reasoning="a"), True),
        (delta(tool_calls=[{"index": 0}]), True),
        (delta("stop"), False),
        (delta("stop", content="end"), True),
        (text("a"), True),
        (text("", "length"), False),
        ({"choices": [], "usage": {}}, False),
        ({"choices": [], "something": "new"}, False),
    ],
)
def test_which_chunks_are_tokens(chunk: dict[str, Any], counts: bool) -> None:
    stream = EventStream()
    stream.feed(event(chunk), 1.0)
    assert stream.num_chunks == counts


WHOLE = b"".join(
    [
        b": a comment\r\n\r\n",
        event(delta(role="assistant", content="")),
        event(delta(content="é")).replace(b"\n", b"\r\n"),
        b"event: chunk\n" + event(delta(content="b")),
        event(delta("stop")),
        b"data:[DONE]\n\n",
    ]
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=20).map(sorted))
def test_any_cutting_of_the_bytes_reads_the_same(cuts: list[int]) -> None:
    stream = EventStream()
    for now, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(WHOLE)], strict=True)):
        stream.feed(WHOLE[begin:end], float(now))
    assert stream.num_chunks == 2
    assert stream.finished


@pytest.mark.parametrize(
    ("chunk", "kind"), [(b"{oops", "bad_chunk"), (b"[1]", "bad_chunk"), ({"error": {"code": 1}}, "error_event")]
)
def test_what_is_no_chunk_is_an_error_that_quotes_it(chunk: Any, kind: str) -> None:
    with pytest.raises(StreamError) as caught:
        EventStream().feed(event(chunk), 0.0)
    assert caught.value.kind == kind
    assert str(caught.value)


def ask(
    server: FakeServer, sample: Sample = SAMPLE, count: int = 1, ignore_eos: bool = True, **fields: Any
) -> list[RequestRecord]:
    target = TargetOptions(**{"base_url": server.url, **fields})

    async def main() -> list[RequestRecord]:
        async with OpenAIClient(target, ignore_eos) as client:
            await client.find_model()
            begin = clock()
            return [await client.send(client.payload(sample), index, None, begin) for index in range(count)]

    return asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_known_timing_is_measured(endpoint: str) -> None:
    with FakeServer(Behaviour(first=0.06, between=0.02)) as server:
        (record,) = ask(server, endpoint=endpoint)
    assert record.error is None
    assert record.ttft is not None
    assert record.tpot is not None
    # Never early; late by what a busy machine may take.
    assert 0.06 <= record.ttft < 0.06 + 0.25
    assert 0.019 <= record.tpot < 0.02 + 0.1
    assert len(record.gaps) == 3
    assert 0.12 - 0.005 <= record.e2e < 0.12 + 0.5
    assert record.e2e >= record.ttft + sum(record.gaps) - 1e-9
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 4, 1)


def test_without_usage_the_chunks_are_counted() -> None:
    with FakeServer(Behaviour(usage=False)) as server:
        (record,) = ask(server)
    assert record.counted_chunks
    assert record.output_tokens == 4


def test_failures_have_kinds_and_the_server_goes_on_being_measured() -> None:
    kinds = ["503", "429", "error_event", "bad_chunk", "disconnected", "incomplete", "timeout"]
    with FakeServer(Behaviour(faults=deque(kinds))) as server:
        records = ask(server, count=8, request_timeout=1.0)
    expected = ["http_503", "http_429", *kinds[2:], None]
    assert [record.error for record in records] == expected
    assert "busy" in (records[0].message or "")
    assert "the engine died" in (records[2].message or "")
    assert all(record.end >= record.start for record in records)


def test_nobody_there_is_a_failed_connection() -> None:
    with FakeServer() as server:
        url = server.url
    server.url = url
    (record,) = ask(server, model="known")
    assert record.error == "connect"
    with pytest.raises(BenchmarkError, match="--ready-timeout"):
        ask(server)


def test_waiting_for_a_server_that_is_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.client._READY_POLL_SECONDS", 0)
    with FakeServer(Behaviour(starting=3)) as server:
        assert ask(server, ready_timeout=60)[0].error is None
    assert server.behaviour.starting == 0


@pytest.mark.parametrize("model", [None, "known"])
def test_a_server_that_says_it_is_not_ready_is_not_measured(model: str | None) -> None:
    with FakeServer(Behaviour(starting=9)) as server:
        with pytest.raises(BenchmarkError, match=r"not ready, loading; .*--ready-timeout"):
            ask(server, model=model)
        assert not server.bodies


def test_the_key_is_sent_and_a_wrong_one_is_named() -> None:
    with FakeServer(Behaviour(key="secret")) as server:
        assert ask(server, api_key="secret")[0].error is None
        assert ask(server, model="known")[0].error == "http_401"
        with pytest.raises(BenchmarkError, match=r"HTTP 401.*--api-key"):
            ask(server, api_key="wrong")


def test_a_server_without_models_needs_a_name() -> None:
    with FakeServer(Behaviour(models=())) as server, pytest.raises(BenchmarkError, match="--model"):
        ask(server)


def test_bodies_say_what_was_asked_for() -> None:
    with FakeServer() as server:
        ask(server, extra_body={"top_k": 5, "temperature": 0.5})
        ask(server, replace(SAMPLE, text=None, token_ids=[1, 2]), model="other", ignore_eos=False)
        ask(server, endpoint="chat", base_url=f"{server.url}/v1/")
        ask(server, replace(SAMPLE, text=None, messages=[{"role": "user", "content": "x"}]), endpoint="chat")
    first, ids, chat, messages = server.bodies
    assert first == {
        "model": "fake-model",
        "prompt": "one two three",
        "max_tokens": 4,
        "temperature": 0.5,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert (ids["prompt"], ids["model"], "ignore_eos" in ids) == ([1, 2], "other", False)
    assert chat["messages"] == [{"role": "user", "content": "one two three"}]
    assert messages["messages"] == [{"role": "user", "content": "x"}]
    assert server.paths == ["/v1/completions"] * 2 + ["/v1/chat/completions"] * 2


@pytest.mark.parametrize(
    ("endpoint", "sample"),
    [("chat", Sample(token_ids=[1], output_len=1)), ("completions", Sample(messages=[{}], output_len=1))],
)
def test_prompts_must_suit_the_endpoint(endpoint: Any, sample: Sample) -> None:
    client = OpenAIClient(TargetOptions(endpoint=endpoint), True)
    with pytest.raises(ConfigError, match="--endpoint"):
        client.payload(sample)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(BenchmarkError, match=r"pip install 'quire\[bench\]'"):
        OpenAIClient(TargetOptions(), True)
