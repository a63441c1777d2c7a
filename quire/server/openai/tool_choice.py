"""OpenAI's words for who decides about calls, which chat completions and Responses share."""

from __future__ import annotations

from quire.server.conversation.request import AUTO, NONE, REQUIRED, ToolChoice
from quire.types.errors import RequestError

_WORDS = {"auto": AUTO, "none": NONE, "required": REQUIRED}


def choice_of_word(word: str) -> ToolChoice:
    choice = _WORDS.get(word)
    if choice is None:
        raise RequestError(
            f"tool_choice is {word[:40]!r} but must be auto, none, required or an object that names a function",
            "tool_choice",
        )
    return choice
