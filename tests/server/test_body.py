"""Bodies are read as JSON, quickly, and what is no JSON is refused with the place where it goes wrong."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server import body
from quire.server.body import MAX_VALUES, JsonRequest
from quire.server.errors import BodyError
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import long_client, serving

HEADERS = {"content-type": "application/json"}


async def read(data: bytes) -> object:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": data, "more_body": False}

    return await JsonRequest({"type": "http", "headers": []}, receive).json()


@pytest.mark.parametrize("data", [b'{"a": [1, 2.5, null]}', b'"\\ud83d\\ude00"', b"123456789012345678901234567890"])
async def test_reads_what_the_standard_library_reads(data: bytes) -> None:
    assert repr(await read(data)) == repr(json.loads(data))


async def test_says_where_a_body_is_no_json() -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post("/v1/completions", content=b'{"prompt": "a",}', headers=HEADERS)
    assert response.status_code == 400
    assert "character 15" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"prompt": "\xff"}', "the body is not UTF-8 at byte 12; send JSON in UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body holds a number of too many digits; send a smaller one"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "the body is nested too deeply; send flatter JSON"),
    ],
)
async def test_says_what_else_is_wrong_with_a_body(data: bytes, message: str) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post("/v1/completions", content=data, headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("field", ["chat_template_kwargs", "documents", "tools", "metadata", "unknown"])
@pytest.mark.parametrize("depth", [100, 400])
async def test_deeply_nested_fields_are_refused_and_moderate_ones_are_not(field: str, depth: int) -> None:
    value = nested(depth)
    fields = {
        "documents": [{"x": value}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}],
    }
    data = json.dumps(CHAT | {field: fields.get(field, {"x": value})})
    async with serving(FakeClient("x")) as session:
        response = await session.post("/v1/chat/completions", content=data, headers=HEADERS)
    assert response.status_code in ((200, 400) if depth == 100 else (400,)), response.text
    if depth == 400:
        assert response.json()["error"]["message"] == "the body is nested too deeply; send flatter JSON"


async def test_brackets_in_text_are_no_nesting() -> None:
    prompt = '[{"\\' * 80 + "," * (MAX_VALUES + 1000)
    async with serving(long_client("x")) as session:
        response = await session.post("/v1/completions", json={"prompt": prompt, "truncate_prompt_tokens": 5})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "field", "words"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}] * 10_000},
            "messages",
            "at most 4096",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}] * 200_000},
            None,
            "65536 lists and objects",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}]},
            "messages",
            "messages holds 5001 items",
        ),
        ("/v1/completions", {"prompt": [[7]] * 5000}, "prompt", "5000 items"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": dict.fromkeys(range(70_000), 1)},
            "logit_bias",
            "70000 items",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 10_000}, "input", "10000 items"),
        ("/v1/completions", {"prompt": [7] * 2_000_000}, None, "more than 1048576 values"),
        ("/v1/completions", {"prompt": [7] * 100_000}, "prompt", "has 100000;"),
        ("/v1/completions", {"prompt": "x", "bad_words": ["w"] * 2000}, "bad_words", "at most 1024"),
        ("/v1/completions", {"prompt": "x", "bad_words": ["w" * 2000]}, "bad_words", "a word of 2000 characters"),
    ],
    ids=[
        "messages",
        "many messages",
        "parts",
        "prompts",
        "bias",
        "input",
        "tokens",
        "tokens of a prompt",
        "bad words",
        "long bad word",
    ],
)
async def test_counts_are_bounded(path: str, fields: dict[str, object], field: str | None, words: str) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post(path, content=json.dumps(fields), headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert words in response.json()["error"]["message"]


STRINGS = st.text(st.sampled_from('[]{},"\\\n a'), max_size=8)
VALUES = st.recursive(
    STRINGS | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner)
)


@given(VALUES)
def test_depth_and_values_are_counted_outside_of_texts(value: object) -> None:
    """The bounds lie exactly at what a body holds: one less refuses it."""

    def depth(part: object) -> int:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    data = json.dumps(value).encode()
    limits = {"MAX_DEPTH": depth(value), "_PIECE": 7}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(body, name, limit)
        body.check_size(data)
        if depth(value):
            patch.setattr(body, "MAX_DEPTH", depth(value) - 1)
            with pytest.raises(BodyError, match="nested too deeply"):
                body.check_size(data)


async def test_a_large_body_is_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    decode = body._decode
    monkeypatch.setattr(body, "_decode", lambda data: threads.append(threading.get_ident()) or decode(data))
    assert await read(b'"' + b"x" * 10 + b'"') == "x" * 10
    assert await read(b'"' + b"x" * 100_000 + b'"') == "x" * 100_000
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"prompt": "a", "user": "\\ud800"}', "user"),
        (b'{"prompt": "a", "user": "\xed\xa0\x80"}', "user"),  # the same, as bytes that are not quite UTF-8
        (b'{"prompt": "a", "metadata": {"b": [1, {"\\udc00": 1}]}}', "metadata.b[1].?"),
        (b'{"prompt": "a", "x": [0, NaN], "y": NaN}', "x[1]"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ],
)
async def test_names_what_no_json_may_hold(data: bytes, param: str) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post("/v1/completions", content=data, headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"].startswith(param)
