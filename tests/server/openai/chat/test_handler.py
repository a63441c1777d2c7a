"""Chat completions over the fake engine: every field that has a meaning, and the shapes of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.fake_client import EOS, MAX_MODEL_LEN, FakeClient
from tests.server.helpers import MODEL, events_of, long_client, serving

HELLO = [{"role": "user", "content": "Hello"}]
URL = "/v1/chat/completions"


async def ask(client: FakeClient, _status: int = 200, _settings: dict[str, Any] | None = None, **body: Any) -> Any:
    async with serving(client, **(_settings or {})) as session:
        response = await session.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == _status, response.text
    return events_of(response.text) if body.get("stream") and _status == 200 else response.json()


async def test_the_shape_of_an_answer() -> None:
    answer = await ask(FakeClient("Hi there"), model=MODEL)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi there", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len("[user]Hello\n[assistant]"),
            "completion_tokens": 9,
            "total_tokens": 32,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_the_shape_of_a_stream() -> None:
    chunks = await ask(FakeClient("Hi"), stream=True)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "i"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_in_a_stream() -> None:
    *chunks, last = await ask(FakeClient("Hi"), stream=True, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await ask(FakeClient("Hi"), stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in (*chunks, last)] == [0, 1, 2, 3, 3]


@settings(max_examples=25, deadline=None)
@given(
    answer=st.text(max_size=30),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    chunk=st.integers(1, 5),
    n=st.integers(1, 3),
    logprobs=st.booleans(),
)
async def test_a_stream_says_what_a_body_says(
    answer: str, stop: list[str], chunk: int, n: int, logprobs: bool
) -> None:
    body = {"stop": stop, "n": n, "logprobs": logprobs, "seed": 1, "include_stop_str_in_output": len(stop) == 2}

    def client() -> FakeClient:
        return FakeClient(answer.encode("utf-8", "replace").decode(), chunk=chunk)

    whole = await ask(client(), **body)
    chunks = await ask(client(), **body, stream=True, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for part in chunks for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in parts) == choice["message"]["content"]
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        streamed = [entry for c in parts if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert streamed == (choice["logprobs"]["content"] if logprobs else [])


async def test_logprobs() -> None:
    answer = await ask(FakeClient("A"), logprobs=True, top_logprobs=2, max_tokens=1)
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "A",
                "logprob": -2.0,
                "bytes": [65],
                "top_logprobs": [
                    {"token": "B", "logprob": -1.0, "bytes": [66]},
                    {"token": "A", "logprob": -2.0, "bytes": [65]},
                ],
            }
        ],
        "refusal": None,
    }
    plain = await ask(FakeClient("A"), logprobs=True, max_tokens=1, return_tokens_as_token_ids=True)
    assert plain["choices"][0]["logprobs"]["content"] == [
        {"token": "token_id:65", "logprob": -2.0, "bytes": [65], "top_logprobs": []}
    ]


async def test_prompt_logprobs_and_token_ids() -> None:
    answer = await ask(FakeClient("A"), prompt_logprobs=1, return_token_ids=True)
    ids = list(b"[user]Hello\n[assistant]")
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == [65, EOS]
    first, second, *_ = answer["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])] == {"logprob": -2.0, "rank": 2, "decoded_token": chr(ids[1])}
    chunks = await ask(FakeClient("A"), stream=True, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == ids
    assert [chunk["prompt_token_ids"] for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [None, [65], [EOS], None]


async def test_what_is_named_and_not_there_is_null() -> None:
    answer = await ask(FakeClient("A"), prompt_logprobs=None, return_token_ids=False)
    assert (answer["prompt_logprobs"], answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (None,) * 3
    chunks = await ask(FakeClient("A"), stream=True, return_token_ids=False)
    assert {(chunk["prompt_token_ids"], chunk["choices"][0]["token_ids"]) for chunk in chunks} == {(None, None)}
    plain = await ask(FakeClient("A"))
    assert not {"prompt_logprobs", "prompt_token_ids"} & plain.keys()
    assert "token_ids" not in plain["choices"][0]


async def test_fields_reach_the_engine() -> None:
    client = FakeClient("x")
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 7,
        "logit_bias": {"65": -1},
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "stop_token_ids": [1],
        "ignore_eos": False,
        "min_tokens": 1,
        "allowed_token_ids": [120, EOS],
        "priority": 3,
        "cache_salt": "salt",
        "max_completion_tokens": 9,
        "max_tokens": 4,
    }
    await ask(client, **fields)
    request = client.added[0]
    params = request.params
    for name in fields.keys() - {"n", "logit_bias", "priority", "cache_salt", "max_completion_tokens", "max_tokens"}:
        value = getattr(params, name)
        assert (list(value) if isinstance(value, tuple) else value) == fields[name]
    assert params.logit_bias == {65: -1.0}
    assert (request.priority, request.cache_salt, request.max_tokens) == (3, "salt", 9)
    assert len(client.added) == 2


async def test_max_tokens_is_clamped_and_open_ended_by_default() -> None:
    for limit in (10**9, MAX_MODEL_LEN, None):
        client = FakeClient("x")
        await ask(client, max_tokens=limit)
        assert client.added[0].max_tokens == MAX_MODEL_LEN - len("[user]Hello\n[assistant]")


async def test_content_parts_are_text() -> None:
    client = FakeClient("x")
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    await ask(client, messages=[{"role": "user", "content": parts}])
    assert bytes(client.added[0].token_ids) == b"[user]one\ntwo\nthree\n[assistant]"


async def test_refusals_of_earlier_answers_are_text() -> None:
    client = FakeClient("x")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": None, "refusal": "never"},
    ]
    await ask(client, messages=messages)
    assert bytes(client.added[0].token_ids) == b"[user]a\n[assistant]no\n[user]b\n[assistant]never\n[assistant]"
    answer = await ask(FakeClient(), 400, messages=[{"role": "assistant", "content": [{"type": "refusal"}]}])
    assert answer["error"]["param"] == "messages[0].content[0].refusal"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
async def test_other_parts_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:,"}}]
    answer = await ask(FakeClient(), 400, messages=[{"role": "user", "content": content}])
    assert answer["error"]["param"] == "messages[0].content[1].type"
    assert kind in answer["error"]["message"]


TOOLS_TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
    "{% else %}{{ m.role }}:{{ m.content }}:{{ m.tool_call_id }};{% endif %}{% endfor %}{{ mood }}{{ documents }}"
)


async def test_tool_calls_in_the_history_reach_the_template_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern", "days": 2}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, empty], "refusal": None, "audio": None},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]
    client = FakeClient("x")
    await ask(
        client,
        messages=messages,
        chat_template=TOOLS_TEMPLATE,
        chat_template_kwargs={"mood": "calm"},
        documents=[{"text": "d"}],
        _settings={"allow_request_chat_template": True},
    )
    assert bytes(client.added[0].token_ids).decode() == ("user:Hi:;city=Bern;days=2;tool:sun:c1;calm[{'text': 'd'}]")
    call["function"]["arguments"] = '{"city": '
    answer = await ask(FakeClient(), 400, messages=messages)
    assert answer["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_a_template_of_the_request_must_be_allowed_and_good() -> None:
    answer = await ask(FakeClient(), 400, chat_template="{{ messages }}")
    assert answer["error"]["param"] == "chat_template"
    allowed = {"allow_request_chat_template": True}
    for template in ("{% for", "{{ ''.__class__ }}", "{% for i in range(10**9) %}x{% endfor %}"):
        answer = await ask(FakeClient(), 400, chat_template=template, _settings=allowed)
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt"])
async def test_template_variables_cannot_replace_the_requests_own(name: str) -> None:
    answer = await ask(FakeClient(), 400, chat_template_kwargs={name: 1})
    assert answer["error"]["param"] == "chat_template_kwargs"


async def test_continuing_the_last_message_with_echo() -> None:
    client = FakeClient(" world")
    messages = [*HELLO, {"role": "assistant", "content": "Hello"}]
    answer = await ask(client, messages=messages, continue_final_message=True, echo=True)
    assert bytes(client.added[0].token_ids) == b"[user]Hello\n[assistant]Hello"
    assert answer["choices"][0]["message"]["content"] == "Hello world"
    chunks = await ask(FakeClient(" world"), messages=messages, continue_final_message=True, echo=True, stream=True)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello world"
    client = FakeClient("x")
    await ask(client, messages=messages, add_generation_prompt=False)
    assert bytes(client.added[-1].token_ids) == b"[user]Hello\n[assistant]Hello\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"model": "\ud800"}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"priority": 1 << 40}, "priority"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_a_wrong_value_is_named(body: dict[str, Any], param: str) -> None:
    client = FakeClient()
    async with serving(client) as session:
        response = await session.post(
            URL, content=json.dumps({"messages": HELLO, **body}), headers={"content-type": "application/json"}
        )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert client.added == []


async def test_an_unknown_model_is_a_404() -> None:
    async with serving() as session:
        response = await session.post(URL, json={"model": "gpt-4", "messages": [{"role": "user"}]})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


async def test_an_error_in_the_engine_is_a_500_or_the_last_event() -> None:
    def dying() -> FakeClient:
        return long_client("x" * 100, dies_at_step=3)

    answer = await ask(dying(), 500)
    assert answer["error"] == {
        "message": "the fake engine died as it was told to",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    *chunks, last = await ask(dying(), stream=True)
    assert len(chunks) == 4
    assert last == answer


async def test_what_fails_before_the_first_token_has_a_status_even_in_a_stream() -> None:
    async with serving(FakeClient(dies_at_step=0)) as session:
        response = await session.post(URL, json={"messages": HELLO, "stream": True})
    assert response.status_code == 500  # no other engine comes to take it over
    assert response.json()["error"]["type"] == "server_error"


async def test_request_ids() -> None:
    client = FakeClient("x")
    async with serving(client) as session:
        for _ in range(2):
            response = await session.post(URL, json={"messages": HELLO}, headers={"x-request-id": "mine-1"})
            assert response.headers["x-request-id"] == "mine-1"
            assert response.json()["id"] == "chatcmpl-mine-1"
        response = await session.post(URL, json={"messages": HELLO, "request_id": "body-1"})
        assert response.json()["id"] == "chatcmpl-body-1"
        own = response.headers["x-request-id"]
    assert len(own) == 24
    assert len({request.request_id for request in client.added}) == 3
