"""A server whose model says what an agent needs to hear: it calls the tool it is offered, then tells the result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.types.request import EngineRequest
from tests.frontend.fake_client import TOKENIZER, FakeClient
from tests.server.helpers import MODEL, LiveServer, live_server, long_client

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
ADDRESS = "http://127.0.0.1:8000"
SERVED = "smollm2"
ANSWER = "It is sunny in Köln."
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Köln"}}\n</tool_call>'


def answer(request: EngineRequest) -> Sequence[int]:
    """A call of the first tool, unless there is none or its result is already there."""
    prompt = TOKENIZER.decode(request.token_ids, skip_special_tokens=False)
    tools = re.search(r'<tools>\n.*?"name":"(\w+)"', prompt, flags=re.S)
    if tools is None or "<tool_response>" in prompt:
        return list(ANSWER.encode())
    return list((CALL % tools[1]).encode())


def scripted_client() -> FakeClient:
    return long_client(answer, chunk=3)


@contextmanager
def scripted_server() -> Iterator[LiveServer]:
    with live_server(scripted_client()) as server:
        yield server


def section(title: str, language: str) -> str:
    """The first block of a language under a heading of docs/agents.md."""
    text = PAGE.read_text(encoding="utf-8")
    match = re.search(rf"^### {re.escape(title)}\n.*?^```{language}\n(.*?)^```$", text, flags=re.M | re.S)
    assert match is not None, f"docs/agents.md has no {language} block under {title!r}"
    return match[1]


def pointed_at(code: str, url: str, model: str = MODEL) -> str:
    """The page's code with the address and the model of a running server."""
    assert ADDRESS in code
    return code.replace(ADDRESS, url).replace(SERVED, model)
