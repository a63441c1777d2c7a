"""An output's events put together, as a reply that is not streamed needs them, or with fewer of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from quire.types.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Event",
    "ParsedCall",
    "ParsedOutput",
    "ReasoningDelta",
    "TextDelta",
    "assemble",
    "joined",
]


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
    for _, group in itertools.groupby(events, _kind):
        same = list(group)
        first = same[0]
        if len(same) == 1 or isinstance(first, (CallStart, CallEnd)):
            result += same
        elif isinstance(first, CallArguments):
            result.append(CallArguments(first.index, "".join(map(_said, same))))
        else:
            result.append(type(first)("".join(map(_said, same))))
    return result


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), -1 if isinstance(event, (TextDelta, ReasoningDelta)) else event.index


def _said(event: Event) -> str:
    if isinstance(event, (TextDelta, ReasoningDelta)):
        return event.text
    return event.json_fragment if isinstance(event, CallArguments) else ""
