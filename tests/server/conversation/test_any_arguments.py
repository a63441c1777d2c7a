"""Arguments that a model may write and no number or Unicode text holds: every API answers, and takes them back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.helpers import http
from tests.server.scripted import ScriptedClient, scripted_app

HALF = "\\ud83d"
ARGUMENTS = {
    "half a pair": f'{{"city": "{HALF} {HALF}\\ude00 \\\\ud800 \\udc00"}}',
    "infinite": '{"city": 1e999, "n": [-1e400]}',
    "beyond 64 bits": '{"city": 123456789012345678901234567890}',
    "5,000 digits": f'{{"city": {"1" * 5000}}}',
    "deep": f'{{"city": {"[" * 1500}{"]" * 1500}}}',
}
READABLE = {
    "half a pair": {"city": "\ufffd \U0001f600 \\ud800 \ufffd"},
    "infinite": {"city": "1e999", "n": ["-1e400"]},
    "beyond 64 bits": {"city": 123456789012345678901234567890},
    "5,000 digits": {"city": "1" * 5000},
}
SCHEMA = {"type": "object", "properties": {"city": {}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "Hi"}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [QUESTION], "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": [QUESTION], "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": [QUESTION], "tools": [{"name": "weather", "input_schema": SCHEMA}]},
}
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


async def ask(path: str, said: str, status: int = 200, limit: int = 20_000, **body: Any) -> tuple[Any, str]:
    """The text of the answer if it is streamed or no client can read it, or else the answer; and the prompt."""
    app, provider = scripted_app(tool_call_parser="hermes")
    client = ScriptedClient(said)
    provider.use(client)
    async with http(app) as session:
        response = await session.post(path, json=REQUESTS[path] | {LIMITS[path]: limit} | body)
    assert response.status_code == status, response.text
    is_text = body.get("stream") or ARGUMENTS["deep"] in response.text
    return response.text if is_text else response.json(), client.prompts[-1] if client.added else ""


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("name", ARGUMENTS)
async def test_any_arguments_are_answered_whole_streamed_and_cut_short(path: str, name: str) -> None:
    said = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS[name]}}}\n</tool_call>'
    for limit in (20_000, said.index("city") + 10, said.index("city") + 16, len(said) - 20):
        await ask(path, said, limit=limit)
        streamed, _ = await ask(path, said, limit=limit, stream=True)
        assert "the server failed" not in streamed
        if name == "half a pair":
            assert HALF + " " not in streamed.replace("\\\\", "\\")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("name", READABLE)
async def test_any_arguments_can_be_handed_back(path: str, name: str) -> None:
    said = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS[name]}}}\n</tool_call>'
    answer, _ = await ask(path, said)
    field, turn = "input", answer.get("output", [])
    if path == "/v1/chat/completions":
        field, turn = "messages", [answer["choices"][0]["message"]]
    _, prompt = await ask(path, "done", **{field: [QUESTION, *turn, QUESTION]})
    shown = prompt.partition("CALL weather ")[2].partition("\n")[0]
    assert json.loads(shown) == READABLE[name]


async def test_arguments_that_are_nested_too_deep_are_refused_by_name() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": ARGUMENTS["deep"]}}
    message = {"role": "assistant", "tool_calls": [call]}
    answer, _ = await ask("/v1/chat/completions", "x", 400, messages=[QUESTION, message, QUESTION])
    assert answer["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("name", READABLE)
async def test_anthropics_clients_get_an_object_that_they_can_read(name: str) -> None:
    said = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS[name]}}}\n</tool_call>'
    answer, _ = await ask("/v1/messages", said)
    assert answer["content"][0]["input"] == READABLE[name]
