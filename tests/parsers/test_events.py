"""Events put together are the reply that is not streamed."""

from __future__ import annotations

from quire.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ParsedCall,
    ParsedOutput,
    ReasoningDelta,
    TextDelta,
    assemble,
)


def test_events_join_by_kind_and_by_call() -> None:
    events = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        TextDelta("c"),
        CallStart(0, "f", "id0"),
        CallArguments(0, '{"x":'),
        CallArguments(0, " 1}"),
        CallEnd(0),
        TextDelta("d"),
        CallStart(1, "g"),
        CallArguments(1, "{"),
        CallEnd(1, complete=False),
    ]
    calls = (ParsedCall("f", '{"x": 1}', "id0"), ParsedCall("g", "{", complete=False))
    assert assemble(events) == ParsedOutput("cd", "ab", calls)
    assert assemble([]) == ParsedOutput()
