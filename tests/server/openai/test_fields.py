"""Fields outside the request's model: refused by name when they matter, else accepted or ignored with a line."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.server.openai.chat.protocol import ChatCompletionRequest
from quire.server.openai.completions.protocol import CompletionRequest
from quire.server.openai.fields import ACCEPTED, RENAMED, UNSUPPORTED
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def test_no_field_is_both_supported_and_not() -> None:
    extra = UNSUPPORTED.keys() | ACCEPTED | RENAMED.keys()
    assert extra & ChatCompletionRequest.model_fields.keys() == set()
    assert extra & CompletionRequest.model_fields.keys() == {"best_of"}
    assert len(extra) == len(UNSUPPORTED) + len(ACCEPTED) + len(RENAMED)


@pytest.mark.parametrize("name", [*UNSUPPORTED, *RENAMED])
async def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    async with serving(FakeClient("x")) as session:
        refused = await session.post(CHAT, json={**HELLO, name: {"something": "that matters"}})
        null = await session.post(CHAT, json={**HELLO, name: None})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert name in refused.json()["error"]["message"]
    assert null.status_code == 200
    if name in RENAMED:
        assert RENAMED[name][0] in refused.json()["error"]["message"]


HARMLESS: dict[str, Any] = {
    "functions": [],
    "function_call": "auto",
    "modalities": ["text"],
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
}


async def test_harmless_values_are_accepted_silently(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post(CHAT, json={**HELLO, **HARMLESS})
    assert response.status_code == 200, response.text
    assert "ignoring" not in caplog.text


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"modalities": ["text", "audio"]},
        {"store": True},
    ],
)
async def test_values_that_matter_are_refused(field: dict[str, Any]) -> None:
    async with serving() as session:
        response = await session.post(CHAT, json={**HELLO, **field})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(field))


async def test_an_unknown_field_is_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quire"):
        async with serving(FakeClient("x")) as session:
            for value in range(3):
                response = await session.post(CHAT, json={**HELLO, "mystery\n": value})
                assert response.status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring the unknown field 'mystery\\n' of /v1/chat/completions; said once"
    ]


async def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeClient("x")) as session:
        for start in (0, 900):
            names = {f"x{start + i}": 1 for i in range(900)}
            await session.post(CHAT, json={**HELLO, **names})
    assert len(caplog.records) == 1000
