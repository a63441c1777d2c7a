"""What a client reads when its body does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.validation import explain_validation
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving


@pytest.mark.parametrize(
    ("errors", "field"),
    [
        ([{"type": "missing", "loc": ("body", "messages"), "msg": "Field required"}], "messages"),
        (
            [{"type": "x", "loc": ("body", "messages", 2, "content", "str"), "msg": "Bad", "input": 1}],
            "messages[2].content",
        ),
        ([{"type": "x", "loc": ("body", "stop", "list[str]", 0), "msg": "Bad", "input": 1}], "stop[0]"),
        ([{"type": "x", "loc": ("body", "TokenizeText", "prompt"), "msg": "Bad", "input": 1}], "prompt"),
        ([{"type": "x", "loc": ("body",), "msg": "Bad", "input": 1}], None),
    ],
)
def test_the_field_of_a_validation_error(errors: list[object], field: str | None) -> None:
    message, found = explain_validation(errors)
    assert found == field
    assert message


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/v1/completions", {"prompt": 3}, "prompt is 3, which is wrong: input should be a string or a list"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt[1] is 1, which is wrong: input should be a string"),
        ("/v1/completions", {"prompt": [[1], "a"]}, "prompt[1] is 'a', which is wrong: input should be a list"),
        (
            "/v1/completions",
            {"prompt": [-1]},
            "prompt[0] is -1, which is wrong: input should be greater than or equal to 0 or a string or a list",
        ),
        ("/v1/completions", {"prompt": "a", "stop": [1]}, "stop[0] is 1, which is wrong: input should be a string"),
        ("/v1/completions", {"prompt": "a", "n": []}, "n is [], which is wrong: input should be a valid integer"),
        (
            "/v1/chat/completions",
            {"messages": []},
            "messages is [], which is wrong: list should have at least 1 item after validation, not 0",
        ),
        ("/v1/chat/completions", {"messages": [1]}, "messages[0] is 1, which is wrong: input should be an object"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [1]}], "stop": 1},
            "messages[0].content[0] is 1, which is wrong: input should be an object or a string",
        ),
        (
            "/v1/chat/completions",
            {"messages": [HI], "structured_outputs": {"regexp": "a"}},
            "structured_outputs.regexp is not known here; leave it out",
        ),
        (
            "/v1/chat/completions",
            {"messages": [HI], "max_completion_tokens": 0},
            "max_completion_tokens is 0, which is wrong: input should be greater than or equal to 1",
        ),
        (
            "/v1/responses",
            {"input": "hi", "max_output_tokens": -4},
            "max_output_tokens is -4, which is wrong: input should be greater than or equal to 1",
        ),
        (
            "/v1/messages",
            {"messages": [HI], "max_tokens": 4, "stop_sequences": ["a", ""]},
            "stop_sequences[1] is '', which is wrong: string should have at least 1 character",
        ),
        ("/tokenize", {}, "prompt is missing; give it"),
        ("/tokenize", {"prompt": 5}, "prompt is 5, which is wrong: input should be a string"),
        ("/tokenize", {"messages": "hi"}, "messages is 'hi', which is wrong: input should be a list"),
        ("/tokenize", {"messages": [{"content": "hi"}]}, "messages[0].role is missing; give it"),
    ],
)
async def test_a_client_learns_what_is_wrong_with_its_body(route: str, body: Any, message: str) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post(route, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
