"""The real `openai` client against a server on a loopback socket, with the fake engine behind it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, LiveServer, live_server

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeClient("Hi there"), api_keys=("secret",)) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20) as session:
        yield session


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias/name"]
    assert client.models.retrieve(MODEL).owned_by == "quire"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, user="u", metadata={"a": "b"})
    assert answer.choices[0].message.content == "Hi there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id is not None
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_chat_with_n_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, logprobs=True, top_logprobs=2, max_completion_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content == "Hi"
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2]


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hi there"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == ["Hi there"] * 2


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["aHi", "bHi"]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["b", "H", "i"]
    assert logprobs.token_logprobs == [None, -2.0, -2.0]
    stream = client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hi there"


def test_extra_fields_go_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", extra_body={"top_k": 3, "return_token_ids": True})
    extra = answer.choices[0].model_extra
    assert extra is not None
    assert extra["prompt_token_ids"] == [97]


async def test_the_async_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", timeout=20) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hi there"


def test_errors_are_the_clients_own_types(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "not a name"}}]
        )
    assert tools.value.param == "tools[0].function"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_engine_that_dies_in_a_stream_is_an_error_of_the_client() -> None:
    with live_server(FakeClient("x" * 50, dies_at_step=5)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=20)
        with client:
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError, match="died as it was told to"):
                list(stream)
