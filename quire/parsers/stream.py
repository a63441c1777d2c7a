"""The parser of one output: text goes in as it is generated, events come out; knows nothing of tokens' ids.

However the text is cut into pieces, the events join to the same reply. What is not well-formed becomes text.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from quire.parsers.events import Event, TextDelta
from quire.parsers.format import Tool
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS


class OutputParser(ABC):
    """One per output (per choice). Not thread-safe; never raises because of what a model says."""

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Take in the next piece of text. Only what may turn out to be part of a marker is held back."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The output is over, complete or cut short: let out what was held back and end an open call."""


class PlainParser(OutputParser):
    """All of the output is text."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def plain() -> OutputParser:
    return PlainParser()


def needs_special_tokens(tool_format: str | None, reasoning_format: str | None) -> bool:
    """Whether the output must be detokenized with skip_special_tokens=False to be parsed."""
    tool = None if tool_format is None else TOOL_FORMATS.get(tool_format)
    reasoning = None if reasoning_format is None else REASONING_FORMATS.get(reasoning_format)
    return any(chosen is not None and chosen.special for chosen in (tool, reasoning))


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    prompt_text: str,
    tools: Sequence[Tool] = (),
    parse_tools: bool = True,
    parse_reasoning: bool = True,
    special_tokens: Collection[str] = (),
) -> OutputParser:
    """The parser for one output.

    `prompt_text` is the rendered prompt or its tail with special tokens spelled out: it says whether thinking is
    open. `special_tokens` are the tokenizer's: where the formats need skip_special_tokens off, those that mean
    nothing to them are dropped. Without `parse_tools` calls stay in the text, and thinking without `parse_reasoning`.
    """
    return plain()


def reasoning_is_open(reasoning_format: str | None, prompt_text: str, special_tokens: Collection[str] = ()) -> bool:
    """Whether the prompt ends inside a block of thinking, so that the output begins in it."""
    return False


def new_call_id(tool_format: str, name: str, index: int) -> str:
    """An id for a call that came without one, of the form that the model's chat template accepts."""
    style = TOOL_FORMATS.get(tool_format).id_style
    if style == "kimi":
        return f"functions.{name}:{index}"
    letters = string.ascii_letters + string.digits
    random_part = "".join(secrets.choice(letters) for _ in range(9 if style == "mistral" else 24))
    return random_part if style == "mistral" else f"call_{random_part}"
