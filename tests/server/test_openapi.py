"""Requests made up from the app's own OpenAPI schema, sent to a live server: none may crash it or hang it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase

from quire.server.openai.chat.protocol import ChatCompletion
from quire.server.openapi import schema_of
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import LiveServer, live_server, make_app

schema = schemathesis.openapi.from_dict(make_app().openapi())


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeClient("ok")) as running:
        yield running


@schema.parametrize()
@hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_crashes_or_hangs_the_server(case: schemathesis.Case, server: LiveServer) -> None:
    response = case.call(base_url=server.url, timeout=10)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        if case.path.startswith("/api/"):
            assert isinstance(response.json()["error"], str)
            return
        names = {"message", "type"} if "/messages" in case.path else {"message", "type", "param", "code"}
        assert set(response.json()["error"]) == names


def test_schemas_are_without_references() -> None:
    text = str(schema_of(ChatCompletion))
    assert "$ref" not in text
    assert "cached_tokens" in text
