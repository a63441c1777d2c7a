"""Chooses formats by the signs of them in a model's chat template, and says why."""

from __future__ import annotations

from typing import NamedTuple

from quire.parsers.format import Signs
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS


class Detected(NamedTuple):
    tool_format: str | None
    reasoning_format: str | None
    why: str


def detect(chat_template: str | None) -> Detected:
    """The formats a chat template speaks. The one with the most signs wins; of equals, the first in the registry."""
    if not chat_template:
        return Detected(None, None, "there is no chat template")
    tool = _best({name: TOOL_FORMATS.get(name).signs for name in TOOL_FORMATS}, chat_template)
    reasoning = _best({name: REASONING_FORMATS.get(name).signs for name in REASONING_FORMATS}, chat_template)
    why = f"{_say('tool calls', tool)}; {_say('reasoning', reasoning)}"
    return Detected(tool[0], reasoning[0], why)


def _best(formats: dict[str, Signs], template: str) -> tuple[str | None, tuple[str, ...]]:
    best: tuple[str | None, tuple[str, ...]] = (None, ())
    for name, alternatives in formats.items():
        for signs in alternatives:
            if len(signs) > len(best[1]) and all(sign in template for sign in signs):
                best = (name, signs)
    return best


def _say(what: str, found: tuple[str | None, tuple[str, ...]]) -> str:
    name, signs = found
    if name is None:
        return f"{what}: the chat template shows no known format"
    return f"{what}: {name}, as the chat template has {' and '.join(map(repr, signs))}"
