"""A language model made of a dictionary, with the face that the CLI uses."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

import quire
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.sampling import SamplingParams


class FakeLLM:
    """Echoes the last message, word by word; remembers what it was asked and which requests were cut short."""

    made: list[FakeLLM]

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.requests: list[str | list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.aborted: list[int] = []
        self.made.append(self)

    def answer(self, request: str | list[dict[str, str]]) -> list[str]:
        text = request if isinstance(request, str) else request[-1]["content"]
        return ["You", " said:", *(f" {word}" for word in text.split())]

    def stream(
        self, request: str | list[dict[str, str]], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        self.requests.append(request)
        self.params.append(params)
        number = len(self.requests)
        finished = False
        try:
            words = self.answer(request)
            for index, word in enumerate(words):
                last = index == len(words) - 1
                completion = CompletionOutput(0, word, [index], finish_reason="stop" if last else None)
                finished = last
                yield RequestOutput(f"r{number}", None, [1, 2], [completion], last)
        finally:
            if not finished:
                self.aborted.append(number)


def install(monkeypatch: pytest.MonkeyPatch, llm_type: type[FakeLLM] = FakeLLM) -> list[FakeLLM]:
    """Put a fake in the place of quire.LLM; the returned list gets every instance that is made."""
    made: list[FakeLLM] = []
    monkeypatch.setattr(llm_type, "made", made, raising=False)
    # Not setattr: that would look up the real one first, and import all of it.
    monkeypatch.setitem(vars(quire), "LLM", llm_type)
    return made
