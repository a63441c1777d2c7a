"""The npm `openai` client against a server on a loopback socket, with the fake engine behind it."""

from __future__ import annotations

import pytest

from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, live_server
from tests.server.npm import talk


def test_the_npm_client(pytestconfig: pytest.Config) -> None:
    with live_server(FakeClient("Hi there"), api_keys=("secret",)) as server:
        heard = talk(pytestconfig, server.url)
    assert heard == {
        "models": [MODEL, "alias/name"],
        "chat": ["Hi there", "Hi there"],
        "tokens": 9,
        "cached": 0,
        "streamed": "Hi there",
        "usage": 9,
        "helper": "Hi there",
        "completion": "aHi there",
        "errors": [["NotFoundError", "model"], ["BadRequestError", "temperature"], ["AuthenticationError", None]],
    }
