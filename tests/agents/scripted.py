"""A server whose model says what an agent needs to hear: it calls the tool it is offered, then tells the result."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.types.request import EngineRequest
from tests.frontend.fake_client import TOKENIZER, FakeClient
from tests.server.helpers import MODEL, LiveServer, live_server, long_client

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"
ADDRESS = "http://127.0.0.1:8000"
SERVED = "smollm2"
ANSWER = "It is sunny in Köln."
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Köln"}}\n</tool_call>'


FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "%s"}}\n</tool_call>'


def answer(request: EngineRequest) -> Sequence[int]:
    """A call of the first tool, unless there is none or its result is already there."""
    return list(say(TOKENIZER.decode(request.token_ids, skip_special_tokens=False)).encode())


def say(prompt: str) -> str:
    if "[[ ## " in prompt:
        return say_to_dspy(prompt)
    tools = re.search(r'<tools>\n.*?"name":"(\w+)"', prompt, flags=re.S)
    if tools is None:
        return ANSWER
    if "<tool_response>" in prompt or ANSWER in prompt:  # smolagents has its own words around results
        return FINAL % ANSWER if '"name":"final_answer"' in prompt else ANSWER  # and ends by a call
    return CALL % tools[1]


def say_to_dspy(prompt: str) -> str:
    """dspy writes and reads fields of its own, tools among them."""
    fields = {"reasoning": "Rome is in Italy.", "answer": ANSWER}
    if "[[ ## next_tool_name ## ]]" in prompt:
        tool, arguments = ("finish", "{}") if "observation_0" in prompt else ("weather", '{"city": "Köln"}')
        fields = {"next_thought": "I ask.", "next_tool_name": tool, "next_tool_args": arguments}
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in (fields | {"completed": ""}).items())


def scripted_client() -> FakeClient:
    return long_client(answer, chunk=3)


@contextmanager
def scripted_server() -> Iterator[LiveServer]:
    with live_server(scripted_client()) as server:
        yield server


def section(title: str, language: str) -> str:
    """The first block of a language under a heading of docs/guides/agents.md."""
    text = PAGE.read_text(encoding="utf-8")
    match = re.search(rf"^### {re.escape(title)}\n.*?^```{language}\n(.*?)^```$", text, flags=re.M | re.S)
    assert match is not None, f"docs/guides/agents.md has no {language} block under {title!r}"
    return match[1]


def minimal_environment(home: Path, **variables: str) -> dict[str, str]:
    """For a program that shall find nothing of the user's: no settings, no sessions, no keys."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **variables}


def pointed_at(code: str, url: str, model: str = MODEL) -> str:
    """The page's code with the address and the model of a running server."""
    assert ADDRESS in code
    return code.replace(ADDRESS, url).replace(SERVED, model)
