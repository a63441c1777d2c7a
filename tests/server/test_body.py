"""Bodies are read as JSON, quickly, and what is no JSON is refused with the place where it goes wrong."""

from __future__ import annotations

import json

import pytest

from quire.server.body import JsonRequest
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving

HEADERS = {"content-type": "application/json"}


async def read(body: bytes) -> object:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return await JsonRequest({"type": "http", "headers": []}, receive).json()


@pytest.mark.parametrize(
    "body", [b'{"a": [1, 2.5, null]}', b'"\\ud800"', b"[NaN]", b"123456789012345678901234567890"]
)
async def test_reads_what_the_standard_library_reads(body: bytes) -> None:
    assert repr(await read(body)) == repr(json.loads(body))


async def test_says_where_a_body_is_no_json() -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post("/v1/completions", content=b'{"prompt": "a",}', headers=HEADERS)
    assert response.status_code == 400
    assert "character 15" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff"}', "the body is not UTF-8 at byte 12; send JSON in UTF-8"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "the body is nested too deeply; send flatter JSON"),
    ],
)
async def test_says_what_else_is_wrong_with_a_body(body: bytes, message: str) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post("/v1/completions", content=body, headers=HEADERS)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
