"""Schemas that are not strict: what can be enforced is, the rest is checked, and the answer says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.helpers import http
from tests.server.openai.chat.test_tools import grammar_of, post, tool
from tests.server.scripted import ScriptedClient, scripted_app

SCHEMA = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "code": {"type": "string", "pattern": "^(?!x)"},
        "size": {"type": "integer", "format": "int64"},
    },
    "required": ["tags"],
}
LOST = ["pattern at #/properties/code/pattern", "uniqueItems at #/properties/tags/uniqueItems"]


def wanted(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("answer", "valid", "error"),
    [
        ('{"tags": ["a", "b"]}', True, None),
        ('{"tags": ["a", "a"]}', False, "uniqueItems is broken at #/tags"),
        ('{"tags": ["a", "b"], "size": "large"}', False, "type is broken at #/size"),
        ('{"tags": ["a', False, "the answer is no JSON as a whole"),
        ('{"tags": [], "code": "y"}', None, "not checked: pattern '^(?!x)' is not understood"),
    ],
)
async def test_the_rest_is_checked(answer: str, valid: bool | None, error: str | None) -> None:
    report = {"not_enforced": LOST, "valid": valid, "error": error}
    body, client = await post(answer, response_format=wanted())
    assert body["choices"][0]["schema_check"] == report
    assert body["choices"][0]["message"]["content"] == answer
    grammar = grammar_of(client)
    assert (grammar.kind, "uniqueItems" in grammar.text, '"tags"' in grammar.text) == ("json", False, True)
    events, _ = await post(answer, stream=True, chunk=3, response_format=wanted())
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["schema_check"] for choice in choices if "schema_check" in choice] == [report]
    assert choices[-1]["schema_check"] == report


async def test_nothing_is_said_where_all_is_enforced_or_nothing_is_answered() -> None:
    whole = {"type": "object", "properties": {"size": {"type": "integer", "format": "int64"}}}
    body, _ = await post('{"size": 1}', response_format=wanted(whole))
    assert "schema_check" not in body["choices"][0]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    body, _ = await post(call, tools=[tool()], response_format=wanted())
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert "schema_check" not in body["choices"][0]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": wanted(strict=True)},
        {"structured_outputs": {"json": SCHEMA}},
        {"tools": [tool(parameters=SCHEMA, strict=True)]},
    ],
)
async def test_strict_schemas_are_refused(fields: dict[str, Any]) -> None:
    body, _ = await post("x", status=400, **fields)
    assert "pattern at #/properties/code/pattern is not supported here" in body["error"]["message"]


async def test_calls_of_tools_that_are_not_strict_obey_what_can_be_said() -> None:
    _, client = await post("x", tools=[tool(parameters=SCHEMA)], tool_choice="required")
    grammar = grammar_of(client)
    assert '"tags"' in grammar.text
    assert "uniqueItems" not in grammar.text
    assert "int64" not in grammar.text


async def test_responses_say_so_too() -> None:
    app, provider = scripted_app(tool_call_parser="none", reasoning_parser="none")
    provider.use(ScriptedClient('{"tags": ["a", "a"]}'))
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    async with http(app) as session:
        response = (await session.post("/v1/responses", json={"input": "Hello", "text": text})).json()
        text["format"]["strict"] = True
        refused = await session.post("/v1/responses", json={"input": "Hello", "text": text})
    assert response["schema_check"] == {
        "not_enforced": LOST,
        "valid": False,
        "error": "uniqueItems is broken at #/tags",
    }
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"tags": ["a", "a"]}
    assert refused.status_code == 400
