"""Reads the text of a completion as events while it is generated, token by token, so that nothing of the result
depends on how tokens arrive; knows parsers, not what their events are for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.parsers.base import OutputParser, PlainParser
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from quire.types.events import CallEnd, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the completions of a request are read; see `make_parser`."""

    tool_format: str | None
    reasoning_format: str | None = None
    prompt_text: str
    tools: tuple[Tool, ...] = ()
    parse_tools: bool = True
    bare_calls: bool = True
    special_tokens: Collection[str] = ()
    one_call: bool = False
    """End a completion with the token that completes its first call."""


class CompletionReader:
    """Reads one completion."""

    __slots__ = ("_events", "_one_call", "_parser", "num_reasoning_tokens")

    def __init__(self, parser: OutputParser, one_call: bool) -> None:
        self._parser: OutputParser | None = parser
        self._one_call = one_call
        self._events: list[Event] = []
        self.num_reasoning_tokens = 0
        """Tokens between the marks of thinking. A mark that is one token does not count."""

    def add(self, text: str) -> bool:
        """Read what one token added. True if it completes the call that is to be the only one."""
        parser = self._parser
        if parser is None:
            return False
        was_thinking = parser.is_thinking
        events = parser.feed(text)
        if was_thinking and parser.is_thinking:
            self.num_reasoning_tokens += 1
        self._events += events
        return self._one_call and any(isinstance(event, CallEnd) and event.complete for event in events)

    def end_at_call(self) -> None:
        """The completion ends with the call that was just completed: what follows it is not said."""
        self._parser = None
        while not isinstance(self._events[-1], CallEnd):
            del self._events[-1]

    def finish(self, rest: str = "") -> None:
        """The completion has ended; `rest` is text that was held back."""
        if self._parser is not None:
            self._events += self._parser.feed(rest)
            self._events += self._parser.finish()
            self._parser = None

    def take(self, delta: bool) -> list[Event]:
        """All events, or those since the last call."""
        if not delta:
            return self._events.copy()
        events, self._events = self._events, []
        return events


def make_reader(reading: Reading | None) -> CompletionReader | None:
    """The reader of one completion; None where all of it is text."""
    if reading is None:
        return None
    parser = make_parser(
        reading.tool_format,
        reading.reasoning_format,
        prompt_text=reading.prompt_text,
        tools=reading.tools,
        parse_tools=reading.parse_tools,
        bare_calls=reading.bare_calls,
        special_tokens=reading.special_tokens,
    )
    return None if isinstance(parser, PlainParser) else CompletionReader(parser, reading.one_call)
