"""What a parser says about a stretch of output; the same events whether the output came at once or in pieces."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the visible reply."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the model's thinking."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. Indexes count from 0; `id` is set only if the model wrote one before the arguments."""

    index: int
    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments. The fragments of a call join to a JSON object; each prefix is a prefix of JSON."""

    index: int
    json_fragment: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A tool call is over. `complete` is false if the output ended or went wrong inside its arguments."""

    index: int
    complete: bool = True


Event = TextDelta | ReasoningDelta | CallStart | CallArguments | CallEnd


class ParsedCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON text; a prefix of it if not `complete`
    id: str | None = None
    complete: bool = True


class ParsedOutput(msgspec.Struct, frozen=True):
    text: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


def assemble(events: Iterable[Event]) -> ParsedOutput:
    """All of an output's events put together, as a reply that is not streamed needs them."""
    text: list[str] = []
    reasoning: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    incomplete: set[int] = set()
    for event in events:
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            starts.append(event)
            arguments.append([])
        elif isinstance(event, CallArguments):
            arguments[event.index].append(event.json_fragment)
        elif not event.complete:
            incomplete.add(event.index)
    calls = tuple(
        ParsedCall(start.name, "".join(parts), start.id, start.index not in incomplete)
        for start, parts in zip(starts, arguments, strict=True)
    )
    return ParsedOutput("".join(text), "".join(reasoning), calls)


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbours of one kind as one: all that may depend on how the output was cut."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            result[-1] = CallArguments(event.index, last.json_fragment + event.json_fragment)
        else:
            result.append(event)
    return result
